"""Choices of storages that use a budget up, from the cuts on both sides of it.

Contract
    Prices add up, as in `cut.py`; between two cuts other choices may suit a budget better.
    Storages are tried in order of their numbers, so that the result is one on every rank. The
    choices returned are the fastest that were looked at, and keep different large storages: what
    the schedule makes of each is seen only then. The best of all need not be among them.

Pseudo-code
    of the cut above the budget, drop what costs least time for each byte until it fits
    of that choice and the cut below, while some step makes it faster and it still fits
        keep one more storage, or one in place of another
    of all choices on the way that fit, the fastest
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from moe_compile.recompute.cut import around
from moe_compile.recompute.storages import Kept, Storages

TRIES: Final = 4000
"""Choices looked at for one budget; a block of DeepSeek-V3 has some 10 storages that matter."""
LEAST_SHARE: Final = 0.001
"""Share of the budget below which a storage is left as the cuts have it."""
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
    for start in (below, search.shrunk(above)):
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
    tries_left: int = TRIES
    found: dict[tuple[int, ...], Kept] = field(default_factory=dict)
    """Large storages that are kept -> the fastest choice that fits."""

    def shrunk(self, kept: Kept) -> Kept:
        """Return a choice that fits, by dropping storages one by one."""
        while kept.nbytes > self.budget:
            fewer = [
                one
                for storage in self._of_at_least(LEAST_SHARE, kept.storages)
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
        made_again = (s for n in sorted(kept.again) for s in self.storages.steps[n].makes)
        more = self._of_at_least(LEAST_SHARE, made_again)
        for dropped in (
            frozenset(),
            *(frozenset({s}) for s in self._of_at_least(LEAST_SHARE, kept.storages)),
        ):
            for storage in more:
                if self.tries_left > 0:
                    yield self._tried(kept.storages - dropped | {storage})

    def _tried(self, chosen: frozenset[int]) -> Kept:
        self.tries_left -= 1
        return self._noted(self.storages.kept(chosen, self.ns))

    def _noted(self, kept: Kept) -> Kept:
        if kept.nbytes <= self.budget:
            large = tuple(self._of_at_least(LARGE, kept.storages))
            self.found[large] = min(self.found.get(large, kept), kept, key=_order)
        return kept

    def _of_at_least(self, share: float, numbers: Iterable[int]) -> list[int]:
        return sorted(s for s in numbers if self.storages.nbytes[s] >= share * self.budget)
