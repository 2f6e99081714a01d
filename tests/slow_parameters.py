"""Which of a test's parameters every run tries, and which the slow and the longest runs alone."""

import pytest


def slow_but(quick, everything):
    """Return `everything` as parameters, marked slow where not in `quick`; a tuple is several."""
    return _marked(everything, lambda x: () if x in quick else pytest.mark.slow)


def one_per_reason(cases):
    """Return the keys of `cases` as parameters, marked slow but for the first with each reason.

    A value is a reason, or a tuple that ends in one.
    """
    quick = {}
    for case, reason in cases.items():
        quick.setdefault(reason[-1] if isinstance(reason, tuple) else reason, case)
    return slow_but(quick.values(), cases)


def exhaustive_but(slow, everything, quick=()):
    """Return `everything` as parameters, slow where in `slow`, exhaustive where not in `quick`."""
    other = pytest.mark.exhaustive
    return _marked(
        everything, lambda x: () if x in quick else pytest.mark.slow if x in slow else other
    )


def _marked(everything, marks_of):
    return [
        pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=marks_of(x)) for x in everything
    ]
