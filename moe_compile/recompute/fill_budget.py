"""Choices of storages that use a budget up, from the cuts on both sides of it.

Contract
    Prices add up, as in `cut.py`; between two cuts other choices may suit a budget better.
    Storages are tried in order of their numbers, so that the result is one on every rank. The
    choices returned are the fastest that were looked at, and keep different large storages: what
    the schedule makes of each is seen only then. The best of all need not be among them.

Pseudo-code
    of the cut above the budget, drop what costs least time for each byte until it fits
    of that choice, of the cut below and of the one that keeps least
        while some step makes it faster and it still fits
            keep one more storage, or one in place of another
            run what was dropped again from what is kept, or from what could be
    of all choices on the way that fit, the fastest
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from moe_compile.recompute.cut import around
from moe_compile.recompute.storages import Kept, Storages

WORK: Final = 800_000
"""Storages looked at for one budget, in all choices; a block of DeepSeek-V3 has 69."""
LARGE: Final = 0.01
"""Share of the budget from which on choices count as different by a storage."""


def filling(storages: Storages, ns: Sequence[int], budget: int, most: int) -> list[Kept]:
    """Return at most `most` choices of at most `budget` bytes at prices `ns`, the fastest first.

    Where nothing fits, the choice of least bytes alone.
    """
    below, above = around(storages, ns, budget)
    if below == above:
        return [below]
    search = _Filling(storages=storages, ns=ns, budget=budget)
    least, _ = around(storages, ns, 0)
    for start in (below, search.shrunk(above), least):
        search.improve(start)
    return sorted(search.found.values(), key=_order)[:most]


def _order(kept: Kept) -> tuple[int, int]:
    return kept.again_ns, kept.nbytes


@dataclass(kw_only=True)
class _Filling:
    """Tries of one search."""

    storages: Storages
    ns: Sequence[int]
    budget: int
    work_left: int = WORK
    found: dict[tuple[int, ...], Kept] = field(default_factory=dict)
    """Large storages that are kept -> the fastest choice that fits."""

    def shrunk(self, kept: Kept) -> Kept:
        """Return a choice that fits, by dropping storages one by one."""
        while kept.nbytes > self.budget and self.work_left > 0:
            fewer = [
                one
                for storage in sorted(kept.storages)
                if (one := self._tried(kept.storages - {storage})).nbytes < kept.nbytes
            ]
            if not fewer:
                return kept
            kept = min(fewer, key=lambda one: self._price_of_a_byte(kept, one))
        return kept

    def _price_of_a_byte(self, kept: Kept, one: Kept) -> float:
        freed = min(kept.nbytes - one.nbytes, kept.nbytes - self.budget)
        return (one.again_ns - kept.again_ns) / freed

    def improve(self, kept: Kept) -> None:
        """Look at choices near `kept`, and near better ones, until no single step is better."""
        better: Kept | None = self._noted(kept)
        while better is not None:
            kept, better = better, None
            fitting = [one for one in self._steps_from(kept) if one.nbytes <= self.budget]
            best = min(fitting, key=_order, default=kept)
            if best.again_ns < kept.again_ns:
                better = best

    def _steps_from(self, kept: Kept) -> Iterator[Kept]:
        more = sorted(s for n in kept.again for s in self.storages.steps[n].makes)
        could = self.storages.not_made_by(kept.again)
        for storage in more:
            yield self._tried(kept.storages | {storage})
        for dropped, others in itertools.product(sorted(kept.storages), (kept.storages, could)):
            for storage in more:
                if self.work_left > 0:
                    yield self._tried(others - {dropped} | {storage})

    def _tried(self, chosen: frozenset[int]) -> Kept:
        self.work_left -= len(self.storages.nbytes)
        return self._noted(self.storages.kept(chosen, self.ns))

    def _noted(self, kept: Kept) -> Kept:
        if kept.nbytes <= self.budget:
            least = LARGE * self.budget
            large = tuple(s for s in sorted(kept.storages) if self.storages.nbytes[s] >= least)
            self.found[large] = min(self.found.get(large, kept), kept, key=_order)
        return kept
