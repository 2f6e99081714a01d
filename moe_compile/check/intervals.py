"""Sets of points in time, as intervals: their unions, what two have in common, their length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Interval = tuple[float, float]
"""Begin and end."""


def union(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Yield disjoint intervals, ascending, that cover the same points."""
    current: Interval | None = None
    for begin, end in sorted(intervals):
        if current is None or begin > current[1]:
            if current is not None:
                yield current
            current = (begin, end)
        else:
            current = (current[0], max(current[1], end))
    if current is not None:
        yield current


def common(first: Sequence[Interval], second: Sequence[Interval]) -> Iterator[Interval]:
    """Yield the overlaps of two lists of disjoint ascending intervals."""
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            yield begin, end
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1


def without(whole: Interval, taken: Iterable[Interval]) -> Iterator[Interval]:
    """Yield what disjoint ascending intervals leave of `whole`."""
    begin, end = whole
    for first, last in taken:
        if last <= begin:
            continue
        if first >= end:
            break
        if first > begin:
            yield begin, first
        begin = max(begin, last)
    if begin < end:
        yield begin, end


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)
