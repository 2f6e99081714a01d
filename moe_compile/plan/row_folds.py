"""Which passes over rows are spared where an exchange in eight bits packs and unpacks them.

Contract
    A gather that makes rows for such an exchange alone is done by the kernel that packs them, and
    one that is all that reads what came by the kernel that unpacks (`passes/fold_row_moves.py`):
    rows are neither written nor read between the two.
    Only of what the traced layer says of itself: where rows are sorted and joined by chunk is for
    the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moe_compile.cost.region_work import RegionWork, Work
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.hop_times import goes_in_hops


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFolds:
    """The folds of one phase; works by their index."""

    gathered: frozenset[int]
    """Exchanges whose rows are gathered as they are packed."""
    permuted: frozenset[int]
    """Exchanges whose rows are put in order as they are unpacked."""
    spared: Mapping[int, float]
    """Work that gathers -> bytes that it neither reads nor writes then."""


NO_FOLDS: Final = RowFolds(gathered=frozenset(), permuted=frozenset(), spared={})


def row_folds(phase: Sequence[Work], is_packed: Callable[[Work], bool]) -> RowFolds:
    """Return the folds of a phase of which some exchanges travel packed."""
    readers: list[list[int]] = [[] for _ in phase]
    for index, work in enumerate(phase):
        for other in work.needs:
            readers[other].append(index)
    gathered, permuted, spared = set(), set(), {}
    for index, work in enumerate(phase):
        if not work.exchange or not is_packed(work):
            continue
        rows = max(work.needs, key=lambda i: phase[i].written, default=None)
        if rows is not None and phase[rows].moves_rows and readers[rows] == [index]:
            gathered.add(index)
            spared[rows] = phase[rows].written
        if len(readers[index]) == 1 and phase[reader := readers[index][0]].moves_rows:
            permuted.add(index)
            spared[reader] = min(work.written, phase[reader].written)
    return RowFolds(gathered=frozenset(gathered), permuted=frozenset(permuted), spared=spared)


def folds_of(region: RegionWork, phase: Sequence[Work], candidate: Candidate) -> RowFolds:
    """Return the folds of a phase of `region` as a candidate runs it.

    What goes in two hops is left out: these price what they spare.
    """
    if candidate.dispatch_wire == candidate.combine_wire == "same":
        return NO_FOLDS
    is_forward = phase is region.forward

    def is_packed(work: Work) -> bool:
        if candidate.nodes != "off" and goes_in_hops(work, candidate.nodes, is_forward=is_forward):
            return False
        return candidate.wire_share(region, work.exchange, is_forward=is_forward) < 1.0

    return row_folds(phase, is_packed)
