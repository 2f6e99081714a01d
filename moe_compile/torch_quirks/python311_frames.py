"""Room for deep calls of Python, taken once instead of ten thousand times.

Fault
    CPython keeps frames in chunks of 16 KiB. The call that does not fit gets a new chunk from the
    system, and its return gives the chunk back. A compiler that works at such an edge pays for this
    at every call: compiling one small MoE program took 50,000 pairs of mmap and munmap, 8 to 10 %
    of its time (CPython's Python/pystate.c, push_chunk, _PyThreadState_PopFrame).
Seen in
    CPython 3.11, which brought these chunks.
Noticed by
    `test_calls_at_the_edge_of_a_chunk_take_memory_each_time` in test_still_there.py.
Contract
    A chunk is at least as large as its first frame: calls made below a function that has frame
    space find room beside that frame. Nothing else changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

SLOTS: Final = 1 << 15
"""8-byte slots of the frame: the chunk is the next power of two, so as much is left again."""


def with_frame_space(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return `function` with room for the frames of some thousand calls below it."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=SLOTS)  # type: ignore[attr-defined]
    return call
