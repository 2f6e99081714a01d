"""The decisions on one MoE region so far: filled in step by step, then turned into a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_compile.journal.reasons import Left, Reason
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.dispatch_rules import DispatchCosts
from moe_compile.plan.hop_prices import HopPrices
from moe_compile.plan.node_rounding import NodeRounding, node_rounding_of
from moe_compile.plan.planned import FoundExperts
from moe_compile.plan.product_times import ProductTimes
from moe_compile.regions.regions import MoERegion, RowProof
from moe_compile.regions.rewrites import Effects
from moe_compile.regions.token_regions import EvenForm, GatheredForm, TwoHopForm
from moe_compile.runtime.rerun import RoomTimes


@dataclass(kw_only=True, slots=True)
class Draft:
    """The decisions on one region so far."""

    found: FoundExperts
    proof: RowProof | Left
    never_packed: Mapping[str, Left] = field(default_factory=dict)
    """Those of `dispatch` and `combine` whose rows must keep their number format -> why."""
    gathered: GatheredForm | None = None
    not_gathered: Left | None = None
    even: EvenForm | None = None
    not_even: Left | None = None
    """Why the host reads integers of it."""
    two_hops: TwoHopForm | None = None
    not_in_two_hops: Left | None = None
    num_chunks: int = 1
    by_tokens: bool = False
    """Whether chunks are of tokens, in place of experts."""
    num_slices: int = 1
    """Slices of hop 1, beside chunks of experts."""
    not_chunked: Left | None = None
    waits: bool = False
    """Whether the host waits for products of its experts, so that "auto" makes one chunk."""
    by_load: bool = False
    """Whether edges of chunks follow from the rows that experts have."""
    even_edges: Left | None = None
    """Why edges stay even, where the option does not ask for that."""
    decision: Decision | None = None
    not_priced: str = ""
    costs: DispatchCosts | None = None
    hop_prices: HopPrices | None = None
    effects: Effects | None = None
    product_times: ProductTimes | None = None
    room_times: RoomTimes | None = None

    @property
    def region(self) -> MoERegion:
        """Return the region."""
        return self.found.region

    @property
    def is_rewritten(self) -> bool:
        """Whether the region gets another form."""
        has_form = any(form is not None for form in (self.even, self.gathered, self.two_hops))
        return has_form or self.num_chunks > 1

    @property
    def nodes(self) -> str:
        """Whether and how rows travel in two hops, as the option names it."""
        if self.two_hops is None:
            return "off"
        return "rounded" if self.two_hops.rounds else "exact"

    @property
    def node_rounding(self) -> NodeRounding | None:
        """Rounding of sums on the nodes; None where none are made there."""
        if self.two_hops is None or not self.two_hops.rounds:
            return None
        of = {"results": self.two_hops.combine_wire != "same"}
        of["gradients"] = self.two_hops.dispatch_wire == "fp8"
        return node_rounding_of(self.two_hops.found, tuple(name for name in of if of[name]))

    def refuse(self, why: Left) -> None:
        """Leave the region whole."""
        self.proof, self.num_chunks = why, 1
        left = Left(Reason.NOT_PROVEN, why.reason.value)
        if self.by_load:
            self.by_load, self.even_edges = False, left
        if self.even is not None:
            self.even, self.not_even = None, left
        if self.gathered is not None:
            self.gathered, self.not_gathered = None, left
        if self.two_hops is not None:
            self.two_hops, self.not_in_two_hops = None, left
