"""The candidates for how a region runs: chunks, their axis, communication dtypes, dispatch.

Contract
    Listed from simple to complicated, always in one order; the first is the region as it is.
    Two hops run in chunks of experts, hop 1 in slices, in any number format of flat exchanges.
    Gathered tokens go in slices of tokens or whole: chunks of experts would repeat their sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final

from moe_compile.cost.region_work import RegionWork, Work

CHUNKS: Final = (1, 2, 4, 8)
"""Numbers of chunks that are tried: beyond eight each chunk's fixed costs outgrow the gain."""
WIRES: Final = ("same", "fp8")
FORWARD_ALONE: Final = "fp8_forward"
"""Communication dtypes tried where an option names them, not by "auto"."""
HOPS: Final = ("exact", "rounded")
HOP_SLICES: Final = (1, 2)
"""Numbers of slices of hop 1 that are tried: they hide only hop 2, on the faster link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One candidate; its fields are named like the options."""

    num_chunks: int = 1
    chunk_by: str = "experts"
    """`experts`, `tokens` or `heads`."""
    chunk_edges: str = "even"
    dispatch_wire: str = "same"
    combine_wire: str = "same"
    dispatch: str = "all_to_all"
    nodes: str = "off"
    hop_slices: int = 1

    def is_lossy(self, work: RegionWork) -> bool:
        """Whether it may change a bit of the region's results."""
        quantises = self.dispatch_wire != "same" or self.combine_wire != "same"
        splits_sums = self.num_chunks > 1 and self.chunk_by == "tokens"
        rounds = self.dispatch == "all_gather" and not work.gather_is_bitwise
        return quantises or splits_sums or rounds or self.nodes == "rounded"

    def wire_share(self, work: RegionWork, exchange: str, *, is_forward: bool) -> float:
        """Return the bytes of an `exchange` of `work` over those in the model's number format."""
        wires = {"dispatch": self.dispatch_wire, "combine": self.combine_wire}
        wire = wires.get(exchange, "same")
        if wire == FORWARD_ALONE:
            wire = "fp8" if is_forward else "same"
        return work.wire_shares.get(wire, 1.0)

    @property
    def options(self) -> dict[str, int | str]:
        """Return the options that ask for it, by name; edges and slices where it has some."""
        if self.chunk_by == "heads":
            return {"attention_chunks": self.num_chunks}
        named: dict[str, int | str] = {
            "chunks": self.num_chunks,
            "chunk_by": self.chunk_by,
            "dispatch": self.dispatch,
            "nodes": self.nodes,
            "dispatch_wire": self.dispatch_wire,
            "combine_wire": self.combine_wire,
        }
        more = {"chunk_edges": self.chunk_edges} if self.chunk_edges != "even" else {}
        return named | more | ({"hop_slices": self.hop_slices} if self.nodes != "off" else {})

    @property
    def complexity(self) -> tuple[int, int, str, str, str, str, int]:
        """Return the key that orders candidates from simple to complicated, without ties."""
        changed = (self.dispatch_wire != "same", self.combine_wire != "same")
        others = sum(changed) + (self.dispatch != "all_to_all")
        others += (self.nodes != "off") + (self.chunk_edges != "even")
        named = self.chunk_by, self.chunk_edges, self.dispatch_wire, self.nodes
        return others, self.num_chunks, *named, self.hop_slices

    def __str__(self) -> str:
        """Return it in words."""
        said = ["one chunk"]
        if self.num_chunks > 1:
            by_load = " by load" * (self.chunk_edges == "load")
            said = [f"{self.num_chunks} chunks of {self.chunk_by}{by_load}"]
        if self.dispatch != "all_to_all":
            slices = f" in {self.num_chunks} slices" if self.num_chunks > 1 else ""
            said = [f"tokens all-gathered{slices}"]
        if self.nodes != "off":
            summed = ["two hops" + (", sums on the nodes" if self.nodes == "rounded" else "")]
            sliced = [f"hop 1 in {self.hop_slices} slices"] * (self.hop_slices > 1)
            said = summed + said * (self.num_chunks > 1) + sliced
        wires = (("dispatch", self.dispatch_wire), ("combine", self.combine_wire))
        said += [f"{name} in {wire}" for name, wire in wires if wire != "same"]
        return ", ".join(said)


def list_candidates(
    work: RegionWork, axes: tuple[str, ...], wires: Collection[str] = WIRES
) -> tuple[Candidate, ...]:
    """Return all candidates for `work`, in chunks along `axes`, in communication dtypes of `wires`.

    Chunks of experts and of heads are equal; those of tokens may be any number.
    """
    return tuple(_listed(work, axes, wires))


def _listed(work: RegionWork, axes: tuple[str, ...], wires: Collection[str]) -> Iterator[Candidate]:
    pairs = [*itertools.product(*(_wires(work, name, wires) for name in ("dispatch", "combine")))]
    for dispatch_wire, combine_wire in pairs:
        for num, axis in _chunks(work, axes):
            yield Candidate(
                num_chunks=num,
                chunk_by=axis,
                dispatch_wire=dispatch_wire,
                combine_wire=combine_wire,
            )
    yield from _gathered(work, axes)
    if work.hops is not None:
        for dispatch_wire, combine_wire in pairs:
            for one in _in_hops(work, axes[0]):
                yield replace(one, dispatch_wire=dispatch_wire, combine_wire=combine_wire)


def _gathered(work: RegionWork, axes: tuple[str, ...]) -> Iterator[Candidate]:
    if work.gathered is not None:
        for num in CHUNKS if "tokens" in axes else CHUNKS[:1]:
            axis = axes[0] if num == 1 else "tokens"
            if work.gathered.num_parts % num == 0:
                yield Candidate(num_chunks=num, chunk_by=axis, dispatch="all_gather")


def _wires(work: RegionWork, exchange: str, wires: Collection[str]) -> list[str]:
    """Return the communication dtypes that rows of an exchange may have."""
    is_packed = "fp8" in work.wire_shares and exchange not in work.never_packed
    return [wire for wire in wires if wire == "same" or is_packed]


def _in_hops(work: RegionWork, axis: str) -> Iterator[Candidate]:
    for nodes, num, slices in itertools.product(HOPS, CHUNKS, HOP_SLICES):
        if work.num_parts % num == 0:
            yield Candidate(num_chunks=num, chunk_by=axis, nodes=nodes, hop_slices=slices)


def _chunks(work: RegionWork, axes: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    for num in CHUNKS:
        for axis in axes[:1] if num == 1 else axes:
            if axis == "tokens" or work.num_parts % num == 0:
                yield num, axis


def goes_in_hops(work: Work, nodes: str, *, is_forward: bool) -> bool:
    """Whether an exchange goes in two hops where the option says `nodes`.

    Rows of tokens forward, and gradients of their sums backward, are copies: either option sends
    them in two hops.
    """
    return work.exchange == copied_exchange(is_forward) or (
        nodes == "rounded" and work.exchange == copied_exchange(not is_forward)
    )


def copied_exchange(is_forward: bool) -> str:
    """Return the exchange of a phase whose rows are copies."""
    return "dispatch" if is_forward else "combine"
