"""Regions of one Dynamo graph: as they were found, and with what was decided on each.

Contract
    Holds nodes of the graph and is stale once the graph is rewritten: reports may read its numbers
    and reasons then, nothing else of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from moe_compile.attention.attention_regions import AttentionRefused, AttentionRegion
from moe_compile.capacity.capacity_regions import CapacityRegion
from moe_compile.journal.entries import Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.dispatch_rules import DispatchCosts, Rounding
from moe_compile.plan.hop_prices import HopPrices
from moe_compile.plan.node_rounding import NodeRounding
from moe_compile.plan.plan import AttentionPlan, CapacityPlan, ExpertsPlan
from moe_compile.regions.regions import MoERegion, Refused, RowProof
from moe_compile.regions.rewrites import Surroundings
from moe_compile.regions.token_regions import DividedForm, GatheredForm


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundExperts:
    """A MoE region, with its proof."""

    region: MoERegion
    proof: RowProof | Refused
    where: str
    """The user's line that dispatches: `file.py:line in function`."""
    num_host_reads: int
    """Times the host waits for integers of the region, as the model is written."""
    rows: Mapping[str, torch.Tensor | None]
    """`dispatch` and `combine` -> fake tensor of the rows it moves, `[R, D]`; None when the tracer
    kept none."""
    row_bytes: Mapping[str, int]
    """`dispatch` and `combine` -> bytes of a row as the model sends it; 0 when unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundAttention:
    """An attention operator, with its region or why it has none."""

    region: AttentionRegion | AttentionRefused
    where: str
    """The user's line that calls it: `file.py:line in function`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCapacity:
    """Experts with a capacity."""

    region: CapacityRegion
    where: str
    """The user's line that dispatches: `file.py:line in function`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What detection found in one Dynamo graph."""

    experts: tuple[FoundExperts, ...] = ()
    attention: tuple[FoundAttention, ...] = ()
    capacity: tuple[FoundCapacity, ...] = ()
    others: tuple[Refused, ...] = ()
    """Exchanges of no region, and regions that were matched and then refused."""

    @property
    def regions(self) -> tuple[MoERegion | AttentionRegion | CapacityRegion, ...]:
        """Return all regions, of experts and of attention."""
        attention = (one.region for one in self.attention)
        found = tuple(one for one in attention if isinstance(one, AttentionRegion))
        capacity = (one.region for one in self.capacity)
        return (*(one.region for one in self.experts), *capacity, *found)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedExperts:
    """A MoE region with its plan, what applying it takes, and what led to it."""

    found: FoundExperts
    plan: ExpertsPlan
    proof: RowProof | Refused
    """That of the region as it is planned: replayed, it may be refused for more than it was."""
    gathered: GatheredForm | None = None
    """How its tokens are gathered, where they are."""
    divided: DividedForm | None = None
    """How its rows come in two hops, where they do."""
    around: Surroundings | None = None
    """What stays of it and around it, where it is rewritten."""
    left: Mapping[str, Verdict] = field(default_factory=dict)
    """`chunks`, `dispatch`, `nodes`, `dispatch_wire` or `combine_wire` -> why it is not
    otherwise."""
    decision: Decision | None = None
    """What the planner chose and against what; None where nothing was left to it."""
    not_priced: str = ""
    """Why torch does not trace the region's layer by itself, where the planner asked for it."""
    costs: DispatchCosts | None = None
    """Bytes and padding either way; None where the gather or the sum was not found."""
    rounding: Rounding | None = None
    """How its sums per token may differ; None where tokens are not gathered."""
    hop_prices: HopPrices | None = None
    """What it takes flat and in two hops; None where that is not asked for or cannot be."""
    node_rounding: NodeRounding | None = None
    """The same where sums are made on the nodes; else None."""
    num_host_reads: int
    """Times the host waits for integers of the region, as it is planned."""
    row_bytes: Mapping[str, int]
    """`dispatch` and `combine` -> bytes of a row as it travels; 0 when unknown."""

    @property
    def is_rewritten(self) -> bool:
        """Whether the region gets another form, its exchanges' number format apart."""
        return self.plan.gathers or self.plan.is_divided or self.plan.is_chunked

    def unquantised(self) -> PlannedExperts:
        """Return the same with rows that travel as the model sends them.

        In two hops rows are packed where these are emitted, not by `quantize_exchanges`.
        """
        if self.plan.is_divided:
            return self
        plan = replace(self.plan, dispatch_wire="same", combine_wire="same")
        return replace(self, plan=plan, row_bytes=self.found.row_bytes)

    def as_written(self, why: Reason) -> PlannedExperts:
        """Return the same region left as the model wrote it."""
        name, plan = self.found.region.name, self.plan
        left = {"chunks": Verdict(candidate=name, reason=why)} if self.is_rewritten else {}
        return replace(
            self,
            plan=ExpertsPlan(
                group=plan.group,
                num_ranks=plan.num_ranks,
                num_local_experts=plan.num_local_experts,
                unproven=plan.unproven,
            ),
            gathered=None,
            divided=None,
            around=None,
            rounding=None,
            node_rounding=None,
            left={**self.left, **left},
            num_host_reads=self.found.num_host_reads,
            row_bytes=self.found.row_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedAttention:
    """An attention operator with its plan, what applying it takes, and what led to it."""

    found: FoundAttention
    plan: AttentionPlan
    left: Mapping[str, Verdict] = field(default_factory=dict)
    """`attention_chunks` -> why it is not otherwise."""
    decision: Decision | None = None
    remarks: tuple[str, ...] = ()
    """What groups of heads may change."""

    @property
    def is_rewritten(self) -> bool:
        """Whether it runs in groups of heads."""
        return self.plan.num_chunks > 1

    def as_written(self, why: Reason) -> PlannedAttention:
        """Return the same left as the model wrote it."""
        if not self.is_rewritten:
            return self
        left = {"attention_chunks": Verdict(candidate=self.found.region.name, reason=why)}
        plan = AttentionPlan(group=self.plan.group, unproven=self.plan.unproven)
        return replace(self, plan=plan, left={**self.left, **left}, remarks=())


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCapacity:
    """Experts with a capacity, with their plan and what led to it."""

    found: FoundCapacity
    plan: CapacityPlan
    left: Mapping[str, Verdict] = field(default_factory=dict)
    """`chunks`, `dispatch`, `dispatch_wire` or `combine_wire` -> why it is not otherwise."""
    decision: Decision | None = None
    not_priced: str = ""
    """As of `PlannedExperts`."""
    last_bits: str = ""
    """Why last bits may depend on which experts a chunk has, "" where nothing says so."""

    @property
    def is_rewritten(self) -> bool:
        """Whether it runs in chunks of experts."""
        return self.plan.num_chunks > 1

    def as_written(self, why: Reason) -> PlannedCapacity:
        """Return the same left as the model wrote it."""
        if not self.is_rewritten:
            return self
        left = {"chunks": Verdict(candidate=self.found.region.name, reason=why)}
        plan = replace(self.plan, num_chunks=1)
        return replace(self, plan=plan, left={**self.left, **left})
