"""By how much compute is slower beside a collective: equal pieces of work, beside one and alone.

Contract
    Pieces are equal by name and sizes. A piece counts as beside where a collective ran for most of
    its time, as alone where none ran at all; others count as neither.
    Several windows may be added: those of a form that overlaps little have more pieces alone.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from moe_compile.check.intervals import common, length, union
from moe_compile.check.profiler_trace import ProfilerTrace

MOSTLY: Final = 0.5
"""Share of its time from which on a piece ran beside a collective."""


@dataclass(kw_only=True, slots=True)
class Pieces:
    """How long pieces of compute took, in microseconds, by name and sizes."""

    beside: dict[str, list[float]] = field(default_factory=dict)
    alone: dict[str, list[float]] = field(default_factory=dict)

    def add(self, trace: ProfilerTrace, *, only_alone: bool = False) -> None:
        """Add the compute of a trace, or only what ran alone there."""
        for key, took, shared_us in _shared(trace):
            if shared_us == 0.0:
                self.alone.setdefault(key, []).append(took)
            elif shared_us >= MOSTLY * took and not only_alone:
                self.beside.setdefault(key, []).append(took)

    def ratios(self) -> list[float]:
        """Return, of each piece beside a collective, its time over that of an equal one alone."""
        typical = {
            key: statistics.median(self.alone[key]) for key in {*self.beside} & {*self.alone}
        }
        return [took / us for key, us in typical.items() if us > 0 for took in self.beside[key]]


def _shared(trace: ProfilerTrace) -> Iterator[tuple[str, float, float]]:
    """Yield of each piece its key, its time, and how long of that a collective ran."""
    spans = list(union((c.begin, c.end) for c in trace.collectives))
    begins = [begin for begin, _ in spans]
    for work in trace.works:
        near = spans[max(0, bisect_left(begins, work.begin) - 1) : bisect_left(begins, work.end)]
        yield work.key, work.end - work.begin, length(common([(work.begin, work.end)], near))
