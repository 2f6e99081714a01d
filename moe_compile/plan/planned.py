"""Regions of one Dynamo graph: as found, and with the decisions on each.

Contract
    Holds nodes of the graph and is stale once the graph is rewritten: reports may read its numbers
    and reasons then, nothing else of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

import torch
import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.journal.entries import Verdict, judged
from moe_compile.journal.reasons import Left, Reason
from moe_compile.ops.wire_format import row_bytes
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.dispatch_rules import DispatchCosts, Rounding
from moe_compile.plan.hop_prices import HopPrices
from moe_compile.plan.node_rounding import NodeRounding
from moe_compile.plan.plan import ExpertsPlan, RegionPlan
from moe_compile.plan.product_times import ProductTimes
from moe_compile.regions.grouped_products import EightBits
from moe_compile.regions.regions import MoERegion, Region, RowProof
from moe_compile.regions.rewrites import Effects
from moe_compile.regions.token_regions import EvenForm, GatheredForm, TwoHopForm
from moe_compile.runtime.rerun import RoomTimes

R = TypeVar("R", bound=Region | Verdict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found(Generic[R]):
    """A candidate of one kind of region."""

    region: R
    """The region, or why there is none."""
    where: str
    """The user's line that dispatches, or calls attention: `file.py:line in function`."""

    @property
    def name(self) -> str:
        """Return the name of the region, or of the candidate that is none."""
        region: Region | Verdict = self.region
        return region.candidate if isinstance(region, Verdict) else region.name

    def verdicts(
        self, config: MegaMoEConfig, left: Mapping[str, Left | None]
    ) -> dict[str, Verdict]:
        """Return option -> the verdict on why it is not carried out, as `left` says."""
        return {
            option: judged(
                config,
                option,
                Verdict(
                    candidate=self.name, reason=why.reason, detail=why.detail, where=self.where
                ),
            )
            for option, why in left.items()
            if why is not None
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundExperts(Found[MoERegion]):
    """A MoE region, with its proof."""

    proof: RowProof | Left
    num_host_reads: int
    """Times the host waits for integers of the region, as the model is written."""
    rows: Mapping[str, torch.Tensor | None]
    """`dispatch` and `combine` -> fake tensor of the rows it moves, `[R, D]`; None when the tracer
    kept none."""
    row_bytes: Mapping[str, int]
    """`dispatch` and `combine` -> bytes of a row as the model sends it; 0 when unknown."""
    products: Mapping[fx.Node, EightBits] | Left
    """How its grouped products are computed in eight bits, where options ask for it and each can
    be, or why they are computed as the model does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The findings of detection in one Dynamo graph."""

    by_kind: Mapping[str, tuple[Found[Any], ...]] = field(default_factory=dict)
    """Name of a kind -> its candidates."""
    others: tuple[Verdict, ...] = ()
    """Exchanges of no region, and regions that were matched and then refused."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """Return all regions, of every kind."""
        found = (one.region for each in self.by_kind.values() for one in each)
        return tuple(region for region in found if not isinstance(region, Verdict))

    @property
    def experts(self) -> tuple[FoundExperts, ...]:
        """Return the experts by counts."""
        found = (one for each in self.by_kind.values() for one in each)
        return tuple(one for one in found if isinstance(one, FoundExperts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned(Generic[R]):
    """A candidate of one kind of region with its plan, and the grounds for it."""

    found: Found[R]
    plan: RegionPlan
    option: str = "chunks"
    """The option that asks for its new form."""
    left: Mapping[str, Verdict] = field(default_factory=dict)
    """Option -> why it is not carried out."""
    decision: Decision | None = None
    """The planner's choice and its alternatives; None where nothing was left to it."""
    not_priced: str = ""
    """Why torch cannot trace the region's layer by itself, where the planner asked for it."""
    remarks: tuple[str, ...] = ()
    """Changes that its new form may make, as a report says them."""

    @property
    def is_rewritten(self) -> bool:
        """Whether the region gets another form."""
        return self.plan.num_chunks > 1

    def as_written(self, why: Reason) -> Self:
        """Return the same region left as the model wrote it."""
        verdict = Verdict(candidate=self.found.name, reason=why)
        left = {self.option: verdict} if self.is_rewritten else {}
        left = {**self.left, **left}
        return replace(self, plan=self.plan.as_written(), left=left, remarks=())


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedExperts(Planned[MoERegion]):
    """A MoE region with its plan, and the analyses needed to apply it."""

    found: FoundExperts
    plan: ExpertsPlan
    proof: RowProof | Left
    """Proof for the region as it is planned: replayed, it may be refused for more than it was."""
    even: EvenForm | None = None
    """How its rows travel without a read by the host, where they do."""
    gathered: GatheredForm | None = None
    """How its tokens are gathered, where they are."""
    two_hops: TwoHopForm | None = None
    """How its rows travel in two hops, where they do."""
    effects: Effects | None = None
    """The nodes that remain of it and around it, where it is rewritten."""
    costs: DispatchCosts | None = None
    """Bytes and padding either way; None where the gather or the sum was not found."""
    rounding: Rounding | None = None
    """How its sums per token may differ; None where tokens are not gathered."""
    hop_prices: HopPrices | None = None
    """Its times flat and in two hops; None where that is not asked for or cannot be."""
    node_rounding: NodeRounding | None = None
    """How its sums per token on the nodes may differ; None where they are not made there."""
    product_times: ProductTimes | None = None
    """Predicted times of its products in eight bits; None where there are none, or no prices."""
    room_times: RoomTimes | None = None
    """Predicted times of its layer by room, where `row_room` is "auto"; None without prices."""

    @property
    def is_rewritten(self) -> bool:
        """Whether the region gets another form, not counting the number format of its exchanges."""
        plan = self.plan
        return bool(plan.room) or plan.gathers or plan.is_in_two_hops or plan.is_chunked

    @property
    def num_host_reads(self) -> int:
        """Return how often the host waits for integers of the region, as it is planned."""
        if self.effects is None or not self.is_rewritten:
            return self.found.num_host_reads
        return 0 if self.plan.room else 1 + self.effects.num_kept

    @property
    def row_bytes(self) -> Mapping[str, int]:
        """Return `dispatch` and `combine` -> bytes of a row as it travels; 0 when unknown."""
        return {
            name: before
            if self.plan.wire(name) == "same" or (rows := self.found.rows[name]) is None
            else row_bytes(int(rows.shape[1]))
            for name, before in self.found.row_bytes.items()
        }

    def unquantised(self) -> Self:
        """Return the same region with rows in the model's number format.

        In two hops rows are packed where the hops are emitted, not by `quantize_exchanges`.
        """
        if self.plan.is_in_two_hops:
            return self
        return replace(self, plan=replace(self.plan, dispatch_wire="same", combine_wire="same"))

    def in_own_format(self) -> Self:
        """Return the same region with products in the model's number format."""
        return replace(self, plan=replace(self.plan, expert_compute="same", fp8_products=()))
