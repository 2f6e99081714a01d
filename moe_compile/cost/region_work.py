"""What is computed and sent around one region, as amounts: operations, bytes, messages.

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
    """One operator of the forward or the backward graph: what it takes."""

    name: str = field(compare=False)
    needs: tuple[int, ...] = ()
    """Indices of earlier work of the same graph whose results it reads."""
    operations: float = 0.0
    """Floating-point operations of a matrix product."""
    product: Product | None = None
    """The shape of a matrix product."""
    nbytes: float = 0.0
    """Read and written, those of weights and their gradients excluded."""
    weight_bytes: float = 0.0
    """Of weights read, or of their gradients written."""
    written: float = 0.0
    """Bytes of its result."""
    link_bytes: float = 0.0
    """That leave a rank; above 0 for collectives alone."""
    exchange: str = ""
    """`dispatch` or `combine` of the region at hand, or their gradients'; `heads`; `other`; ""
    for compute."""
    is_gather: bool = False
    """Whether a collective is an all-gather or a reduce-scatter, which have a rate of their own."""
    num_kernels: float = 1.0
    """Launched where the work is done once."""
    makes_gradient: bool = False
    """Whether its result is the gradient of a weight."""
    is_chunked: bool = False
    """Whether each chunk does its part."""
    expert: int | None = None
    """The local expert all of it belongs to: one chunk does it, the others nothing."""
    slices_weights: bool = True
    """Whether a chunk of experts reads its own weights alone."""
    is_fusible: bool = False
    """Whether a compiler may make its result in the kernels that read it."""
    fuses_what_it_reads: bool = False
    moves_rows: bool = False
    """Whether it does nothing but gather rows by an index."""
    reads_pieces: bool = False
    """Whether it reads rows where they lie, of several matrices, in any order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionWork:
    """All work around one region, in an order that keeps needs."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...] = ()
    num_ranks: int
    num_parts: int
    """Local experts, or KV heads: what chunks are made of."""
    row_bytes: float
    """Bytes of the rows that the region is given; chunks sort and join as many."""
    in_slices: bool = False
    """Whether chunks are slices of what the region is given: nothing is sorted for them."""
    writes_joined: bool = False
    """Whether joined chunks are written before they are read: Inductor does so on a CPU."""
    wire_shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Communication dtype -> its bytes over those of the model's."""
    never_packed: frozenset[str] = frozenset()
    """Exchanges, `dispatch` or `combine`, whose rows must keep the model's number format."""
    imbalance: float = 1.0
    """Rows that the busiest rank receives over those of the mean; work in the region takes so
    much longer."""
    gathered: RegionWork | None = None
    """The same where tokens are gathered instead; its parts are tokens. None where it cannot be."""
    gather_is_bitwise: bool = False
    hops: HopShape | None = None
    """What goes which way where a token crosses to a node once; None where that is not to be."""
    weighted: frozenset[str] = frozenset()
    """Of `dispatch` and `combine` those around which rows are changed, as by their scores."""

    def by_dispatch(self, dispatch: str) -> RegionWork:
        """Return the work of one `dispatch`: this, or the same with tokens gathered."""
        if dispatch != "all_gather":
            return self
        if self.gathered is None:
            raise ValueError("tokens of this region cannot be gathered")
        return self.gathered

    @property
    def phases(self) -> tuple[tuple[Work, ...], ...]:
        """Return the forward's work, then the backward's."""
        return self.forward, self.backward

    @property
    def written_bytes(self) -> float:
        """Return about what all work writes forward, and keeps for backward: half of it all."""
        return sum(work.nbytes for work in self.forward) / 2.0
