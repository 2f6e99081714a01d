"""Calls below a function with frame space take no memory from the system one by one."""

import resource

import pytest

from moe_compile.torch_quirks.python311_frames import with_frame_space

CALLS = 300
DEPTHS = range(400)
"""More frames than a chunk has room for."""


def leaf():
    a = b = c = d = e = f = g = h = 0
    return [[[[[[[a, b, c], d], e], f], g], h], a]


def at_depth(depth):
    """Return the pages that calls at this depth touched for the first time."""
    if depth:
        return at_depth(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def most_pages():
    return max(at_depth(depth) for depth in DEPTHS)


def test_no_depth_of_calls_takes_memory_at_every_call():
    assert with_frame_space(most_pages)() < CALLS // 3


def test_arguments_results_names_and_errors_pass():
    @with_frame_space
    def divided(a, *, by):
        """Divide."""
        return a / by

    assert divided(6, by=3) == 2
    assert (divided.__name__, divided.__doc__) == ("divided", "Divide.")
    with pytest.raises(ZeroDivisionError):
        divided(1, by=0)
