"""The decisions of the one planning pass: a value that ranks compare and later passes apply.

Contract
    Decisions only: no prose of a report, no predicted time, no name of a hardware profile. Ranks
    that rewrite alike have equal values, whatever their GPUs are called and wherever in the
    source their layers stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Self


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionPlan:
    """How a region runs. The defaults are the region as it was written."""

    group: str
    """Name of the process group of its exchanges; "" where there is no region."""
    num_chunks: int = 1
    """Number of chunks, or of groups of heads; of slices of tokens where tokens are gathered."""
    unproven: str = ""
    """Name of the reason why it is left whole; "" where it is proven."""

    def as_written(self) -> Self:
        """Return the plan of the same region with none of the decisions carried out."""
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.default is MISSING}
        return type(self)(**kept, unproven=self.unproven)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsPlan(RegionPlan):
    """How a MoE region runs."""

    num_ranks: int
    num_local_experts: int
    room: int = 0
    """Rows that one rank may send to one rank, where the host reads no integer; else 0."""
    by_tokens: bool = False
    """Whether a chunk has a share of every expert's rows; if not, all rows of some experts."""
    by_load: bool = False
    """Whether the experts of a chunk follow from the rows they have."""
    dispatch: str = "all_to_all"
    """The collective that moves the tokens, as the option names it."""
    num_tokens: int = 0
    """Tokens of each rank where they are gathered and known when compiling, else 0: all ranks
    gather as many."""
    rows_per_token: int = 0
    """Rows of each rank over its tokens where these are gathered, else 0."""
    nodes: str = "off"
    """Whether its rows travel in two hops, as the option names it."""
    num_nodes: int = 1
    """Nodes that the ranks are on, in two hops."""
    hop_slices: int = 1
    """Slices of tokens that hop 1 goes in, in two hops, beside chunks of experts."""
    dispatch_wire: str = "same"
    combine_wire: str = "same"
    """Number format of its rows on the wire, as the options name it."""
    expert_compute: str = "same"
    """Number format of its grouped products, as the option names it."""
    fp8_products: tuple[str, ...] = ()
    """Names of the products in that format."""

    @property
    def gathers(self) -> bool:
        """Whether tokens are gathered instead of rows exchanged."""
        return self.dispatch == "all_gather"

    @property
    def is_in_two_hops(self) -> bool:
        """Whether rows travel in two hops, a token crossing to a node once."""
        return self.nodes != "off"

    @property
    def is_chunked(self) -> bool:
        """Whether it is replayed by chunks of rows."""
        return self.num_chunks > 1 and not self.gathers

    def wire(self, exchange: str) -> str:
        """Return the number format of `dispatch` or `combine`."""
        return self.dispatch_wire if exchange == "dispatch" else self.combine_wire


@dataclass(frozen=True, kw_only=True, slots=True)
class RewritePlan:
    """The proposals of one rewrite after those of regions."""

    name: str
    proposals: tuple[str, ...]
    """The proposals as printed."""
    is_of_regions: bool = False
    """Whether it touches nothing but exchanges of regions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The decisions on one Dynamo graph."""

    regions: Mapping[str, tuple[RegionPlan, ...]] = field(default_factory=dict)
    """Name of a kind of region -> the plans of its candidates."""
    rewrites: tuple[RewritePlan, ...] = ()

    def value(self, number_of_group: Mapping[str, int]) -> dict[str, Any]:
        """Return the decisions as plain data, with numbers of process groups instead of names.

        Groups of one axis have other names on other ranks.
        """
        regions: dict[str, Any] = {
            kind: [asdict(one) | {"group": number_of_group.get(one.group)} for one in plans]
            for kind, plans in self.regions.items()
        }
        return regions | {"rewrites": [asdict(one) for one in self.rewrites]}
