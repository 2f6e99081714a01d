"""Passes over rows that an exchange in eight bits spares, as other kernels do them on the way.

Contract
    A gather that makes rows for an exchange in eight bits alone is done by the kernel that packs
    them, and a gather that is the only reader of received rows by the kernel that unpacks
    (`passes/fold_row_moves.py`): rows are neither written nor read between the two.
    What quantises rows for a product reads a message as it came, and writes as many bytes, if rows
    were only moved since (`passes/feed_products.py`). If nothing else reads them they are not
    unpacked, but once in the backward pass, for gradients of weights.
    Two hops have prices of their own for packing and unpacking (`plan/region_tasks.py`): of these,
    that of rows which feed products alone is spared. The message of hop 2 is in an order of its
    own: where the backward unpacks it, rows are moved once more, as in the model. Sums, and rows
    that are changed behind the hops, feed no product.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from moe_compile.cost.hop_shape import MOVED
from moe_compile.cost.region_work import RegionWork, Work
from moe_compile.plan.candidates import Candidate, copied_exchange, goes_in_hops


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFolds:
    """The folds of one phase; works by their index."""

    gathered: frozenset[int]
    """Exchanges whose rows are gathered as they are packed."""
    permuted: frozenset[int]
    """Exchanges whose rows are put in order as they are unpacked."""
    spared: Mapping[int, float]
    """Work that gathers, or quantises -> bytes that it no longer reads or writes.

    Less than zero where it reads a message itself in place of rows that are made in its kernel."""
    fed: frozenset[int] = frozenset()
    """Exchanges whose rows products alone read, as they came."""
    dropped: frozenset[int] = frozenset()
    """Work that moves such rows, and is not done."""

    def left_of(self, index: int, work: Work) -> Work:
        """Return a work less what is spared of it."""
        if index in self.dropped:
            return replace(work, nbytes=0.0, num_kernels=0.0)
        spared = self.spared.get(index)
        return replace(work, nbytes=work.nbytes - spared) if spared else work


NO_FOLDS: Final = RowFolds(gathered=frozenset(), permuted=frozenset(), spared={})


def row_folds(
    phase: Sequence[Work],
    share_of: Callable[[Work], float],
    in_hops: Collection[int] = (),
) -> RowFolds:
    """Return the folds of a phase; of exchanges `in_hops` those of rows that feed products alone.

    `share_of` gives the bytes of an exchange over those in the model's number format.
    """
    fed = _Fed(phase, share_of)
    gathered, permuted, spared = set(), set(), dict(fed.spared)
    for index, work in enumerate(phase):
        if not work.exchange or share_of(work) == 1.0:
            continue
        if index in in_hops and index not in fed.whole:
            continue
        rows = max(work.needs, key=lambda i: phase[i].written, default=None)
        if rows is not None and phase[rows].moves_rows and fed.readers[rows] == [index]:
            gathered.add(index)
            spared[rows] = phase[rows].written
        readers = fed.readers[index]
        if index not in fed.whole and len(readers) == 1 and phase[reader := readers[0]].moves_rows:
            permuted.add(index)
            spared[reader] = min(work.written, phase[reader].written)
    return RowFolds(
        gathered=frozenset(gathered),
        permuted=frozenset(permuted),
        spared=spared,
        fed=frozenset(fed.whole),
        dropped=frozenset(fed.dropped),
    )


def folds_of(region: RegionWork, phase: Sequence[Work], candidate: Candidate) -> RowFolds:
    """Return the folds of a phase of `region` as a candidate runs it."""
    if candidate.dispatch_wire == candidate.combine_wire == "same":
        return NO_FOLDS
    is_forward = phase is region.forward
    kept = {copied_exchange(is_forward)} - region.weighted
    """Exchanges in two hops that bring the rows which the experts read."""

    def is_in_hops(work: Work) -> bool:
        nodes = candidate.nodes
        return nodes != "off" and goes_in_hops(work, nodes, is_forward=is_forward)

    def share_of(work: Work) -> float:
        if is_in_hops(work) and work.exchange not in kept:
            return 1.0
        return candidate.wire_share(region, work.exchange, is_forward=is_forward)

    return row_folds(phase, share_of, [i for i, work in enumerate(phase) if is_in_hops(work)])


def unpacked_bytes(region: RegionWork, candidate: Candidate) -> float:
    """Return the bytes moved in the backward to unpack rows that its forward did not.

    0 where it makes these rows again.
    """
    folds = folds_of(region, region.forward, candidate)
    if not folds.fed or not any(work.makes_gradient for work in region.backward):
        return 0.0
    if _Fed(region.backward, lambda _: 1.0).makes_again:
        return 0.0
    share = candidate.wire_share(region, "dispatch", is_forward=True)
    again = folds.dropped if candidate.nodes != "off" else ()
    moved = sum(region.forward[index].nbytes for index in again)
    return moved + sum((1.0 + share) * region.forward[index].written for index in folds.fed)


@dataclass(slots=True)
class _Fed:
    """What quantises rows that came in eight bits and were moved at most."""

    phase: Sequence[Work]
    share_of: Callable[[Work], float]
    readers: list[list[int]] = field(init=False)
    """Readers of each work."""
    spared: dict[int, float] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    """Exchanges that nothing else reads."""
    dropped: set[int] = field(default_factory=set)
    """What moves their rows."""
    makes_again: bool = False
    """Whether rows are moved and quantised that the phase is given: what it makes for them is at
    most their index, which is smaller."""

    def __post_init__(self) -> None:
        self.readers = [[] for _ in self.phase]
        for index, work in enumerate(self.phase):
            for other in work.needs:
                self.readers[other].append(index)
        sources = {i: self._source(i) for i, w in enumerate(self.phase) if w.takes_messages}
        for index, source in sources.items():
            if source is not None:
                rows = max(self.phase[i].written for i in self.phase[index].needs)
                message = self.share_of(self.phase[source]) * rows
                self.spared[index] = self.phase[index].nbytes - MOVED * message
        for source in {source for source in sources.values() if source is not None}:
            if self._is_fed(source):
                self.whole.add(source)
                self._drop_moves(source)

    def _source(self, index: int) -> int | None:
        """Return the exchange in eight bits whose rows a work reads, moved at most."""
        moved = 0.0
        while needs := self.phase[index].needs:
            index = max(needs, key=lambda i: self.phase[i].written)
            if not _moves(self.phase[index]):
                break
            moved = self.phase[index].written
        work = self.phase[index]
        if work.exchange:
            return index if self.share_of(work) < 1.0 else None
        self.makes_again |= moved > 0.0 and (_moves(work) or work.written < moved / 2.0)
        return None

    def _is_fed(self, index: int) -> bool:
        """Whether all readers of some rows read them as they came, or move them for such ones."""
        return bool(self.readers[index]) and all(
            reader in self.spared or (_moves(self.phase[reader]) and self._is_fed(reader))
            for reader in self.readers[index]
        )

    def _drop_moves(self, index: int) -> None:
        for reader in self.readers[index]:
            if _moves(self.phase[reader]):
                self.dropped.add(reader)
                self._drop_moves(reader)


def _moves(work: Work) -> bool:
    return work.moves_rows or work.pads_rows
