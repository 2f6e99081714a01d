"""The compute and communication around one region, as amounts: operations, bytes, messages.

Contract
    Amounts hold for any hardware: `cost/rates.py` turns them into time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_compile.cost.hop_shape import HopShape
from moe_compile.hardware.products import Product


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Amounts of one operator of the forward or the backward graph."""

    name: str = field(compare=False)
    needs: tuple[int, ...] = ()
    """Indices of earlier work of the same graph whose results it reads."""
    operations: float = 0.0
    """Floating-point operations of a matrix product."""
    product: Product | None = None
    """The shape of a matrix product."""
    nbytes: float = 0.0
    """Bytes read and written, those of weights and their gradients excluded."""
    weight_bytes: float = 0.0
    """Bytes of weights read, or of their gradients written."""
    written: float = 0.0
    """Bytes of its result."""
    link_bytes: float = 0.0
    """Bytes that leave a rank; above 0 for collectives alone."""
    exchange: str = ""
    """`dispatch` or `combine` of the region at hand, or of their gradients; `heads`; `other`; ""
    for compute."""
    is_gather: bool = False
    """Whether a collective is an all-gather or a reduce-scatter, which have a rate of their own."""
    num_kernels: float = 1.0
    """Kernels launched where the work is not divided into chunks."""
    makes_gradient: bool = False
    """Whether its result is the gradient of a weight."""
    is_chunked: bool = False
    """Whether each chunk does its part of the work."""
    expert: int | None = None
    """The local expert that the work belongs to: one chunk does all of it, the others nothing."""
    slices_weights: bool = True
    """Whether a chunk of experts reads its own weights alone."""
    is_fusible: bool = False
    """Whether a compiler may make its result in the kernels that read it."""
    fuses_what_it_reads: bool = False
    moves_rows: bool = False
    """Whether it does nothing but gather rows by an index."""
    pads_rows: bool = False
    """Whether it does nothing but join rows of zeros to rows."""
    reads_pieces: bool = False
    """Whether it reads rows in place, of several matrices, in any order."""
    quantises: bool = False
    """Whether it quantises rows or a weight for a product."""
    quantises_weight: bool = False
    """Whether it quantises a weight, in one kernel for the experts of all chunks."""
    takes_messages: bool = False
    """Whether it quantises rows as exchanges do, so that it may read a message as it came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The buffers in which rows travel where the host reads no counts."""

    share: float
    """Slots of a rank's buffer over its rows, in one chunk."""
    rounded: float
    """The same of the slots that each chunk more adds, as its shares of counts are rounded up."""

    def of_chunks(self, num_chunks: int) -> float:
        """Return the slots of all chunks over the rows."""
        return self.share + self.rounded * (num_chunks - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionWork:
    """All work around one region; each comes after the work it needs."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...] = ()
    num_ranks: int
    num_parts: int
    """Number of local experts, or of KV heads: chunks are made of these."""
    row_bytes: float
    """Bytes of the rows that the region is given; chunks sort and join as many."""
    in_slices: bool = False
    """Whether chunks are slices of the region's inputs: nothing is sorted for them."""
    writes_joined: bool = False
    """Whether joined chunks are written before they are read: Inductor does so on a CPU."""
    wire_shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Communication dtype -> its bytes over those of the model's dtype."""
    never_packed: frozenset[str] = frozenset()
    """Exchanges, `dispatch` or `combine`, whose rows must keep the model's number format."""
    imbalance: float = 1.0
    """Rows that the busiest rank receives over the mean rank's; work in the region takes so much
    longer."""
    room: Room | None = None
    """The buffers that rows travel in; None where exchanges carry rows alone."""
    gathered: RegionWork | None = None
    """The work with tokens gathered instead; its parts are tokens. None where it cannot be done."""
    gather_is_bitwise: bool = False
    hops: HopShape | None = None
    """Shares of rows by where they go in two hops; None where the region may not use them."""
    weighted: frozenset[str] = frozenset()
    """Those of `dispatch` and `combine` whose rows are changed beside them, as by their scores."""

    def by_dispatch(self, dispatch: str) -> RegionWork:
        """Return the work under one `dispatch`: this one, or the one with tokens gathered."""
        if dispatch != "all_gather":
            return self
        if self.gathered is None:
            raise ValueError("all-gather dispatch does not support this region, so it has no price")
        return self.gathered

    def slots_per_row(self, exchange: str, num_chunks: int) -> float:
        """Return the rows that an exchange sends, padding included, over those that it brings."""
        if self.room is None or exchange not in ("dispatch", "combine"):
            return 1.0
        return self.room.of_chunks(num_chunks)

    @property
    def phases(self) -> tuple[tuple[Work, ...], ...]:
        """Return the forward's work, then the backward's."""
        return self.forward, self.backward

    @property
    def written_bytes(self) -> float:
        """Return about the bytes the forward writes and keeps for backward: half of its bytes."""
        return sum(work.nbytes for work in self.forward) / 2.0
