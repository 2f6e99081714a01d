"""Experts with a capacity: they run in chunks of experts.

Contract
    Decisions follow from graph, options, profile and sizes of groups: the same on every rank.
    A chunk runs the operators of the whole, or there are no chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from moe_compile.capacity.capacity_regions import CapacityRegion
from moe_compile.capacity.detect_capacity import find_capacity_regions
from moe_compile.config import MegaMoEConfig
from moe_compile.cost.read_regions import work_of_capacity
from moe_compile.cost.traced_nodes import Layers, TracedNodes
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.query import source_place
from moe_compile.hardware import HardwareProfile
from moe_compile.journal.reasons import Kind, Left, Reason
from moe_compile.journal.remedies import REMEDIES, changes_for
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.chunk_numbers import last_bits_remark, plan_num_chunks
from moe_compile.plan.decide import choose
from moe_compile.plan.plan import RegionPlan
from moe_compile.plan.planned import Findings, Found, Planned
from moe_compile.plan.state import CompileState
from moe_compile.proof.kernel_bits import bits
from moe_compile.report.region_reports import (
    CHUNKED,
    LEFT_WHOLE,
    RegionReport,
    decision_figures,
    decision_remarks,
    edges_remarks,
)
from passes.kinds.contract import Emitted, Finds, RegionKind
from passes.replay.capacity_chunks import emit_capacity_chunks
from passes.replay.capacity_trial import Trial, try_chunks
from passes.replay.masked_replay import chunk_bounds

AS_MANY_ROWS: Final = Left(Reason.ALREADY_DONE, "by its capacity every expert has as many rows")
OTHER_FORMS: Final = (
    "dispatch", "nodes", "dispatch_wire", "combine_wire", "apply_scores", "expert_compute",
)  # fmt: skip
"""Options for forms other than chunks."""
OF_CAPACITY: Final = "experts with a capacity: equal parts are exchanged, the host reads nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPlan(RegionPlan):
    """How experts with a capacity run."""

    num_ranks: int
    num_local_experts: int


class ByCapacity(RegionKind[Planned[CapacityRegion]]):
    """Regions of experts with a capacity; see the module docstring."""

    name: ClassVar[str] = "capacity"

    def find(self, facts: GraphFacts, config: MegaMoEConfig, before: Findings) -> Finds:
        """Return the regions among exchanges that no other kind claims; region numbers go on."""
        del config
        taken = {launch for region in before.regions for launch in region.launches}
        first = len(before.experts) + sum(other.is_region for other in before.others)
        even = find_capacity_regions(facts, taken, first)
        found = tuple(Found(region=r, where=source_place(r.dispatch)) for r in even.regions)
        return Finds(found=found, others=even.refused, exchanges=even.exchanges)

    def plan(self, state: CompileState, layers: Layers) -> tuple[Planned[CapacityRegion], ...]:
        """Return the plan of every region."""
        found = state.found.by_kind[self.name]
        return tuple(_planned(one, state, layers.around(one.region)) for one in found)

    def emit(self, one: Planned[CapacityRegion], state: CompileState) -> Emitted:
        """Emit experts with a capacity in chunks."""
        del state
        region = one.found.region
        bounds = chunk_bounds(region.num_local_experts, one.plan.num_chunks)
        result = emit_capacity_chunks(region, bounds)
        return Emitted(instead={region.result: result}, body=region.body)

    def say(self, one: Planned[CapacityRegion], config: MegaMoEConfig) -> RegionReport:
        """Return the report on a region."""
        del config
        region, why = one.found.region, one.left.get("chunks")
        unproven = why if why is not None and why.reason.kind is Kind.UNPROVEN else None
        remarks = [why.why] if why is not None and unproven is None else []
        remarks += decision_remarks(one.decision)
        remarks += [f"decided without predicted times: {one.not_priced}"] if one.not_priced else []
        remarks += edges_remarks(one.left)
        others = [(n, left) for n, left in one.left.items() if n not in ("chunks", "chunk_edges")]
        remarks += [f"{name} is not applied: {left.why}" for name, left in others if left.is_asked]
        return RegionReport(
            name=region.name,
            where=one.found.where,
            num_ranks=region.num_ranks,
            num_local_experts=region.num_local_experts,
            num_chunks=one.plan.num_chunks,
            num_host_reads=0,
            verdict=unproven.why if unproven else CHUNKED if one.is_rewritten else LEFT_WHOLE,
            remedy=REMEDIES[unproven.reason] if unproven else "",
            sized_by="capacity",
            decision=decision_figures(one.decision),
            remarks=(*remarks, *one.remarks, OF_CAPACITY),
            to_do=changes_for(left.reason for left in one.left.values()),
        )


def _planned(
    found: Found[CapacityRegion], state: CompileState, layer: TracedNodes
) -> Planned[CapacityRegion]:
    config, region = state.config, found.region
    decision = decide_capacity(region, config, state.hardware, layer)
    num_chunks, why = plan_num_chunks(config, region.num_local_experts, decision)
    if config.chunk_by == "tokens":
        num_chunks, why = 1, Left(Reason.BY_CAPACITY)
    tried = Trial()
    if num_chunks > 1:
        tried = try_chunks(region, chunk_bounds(region.num_local_experts, num_chunks))
        if tried.refused:
            num_chunks, why = 1, Left(Reason.UNKNOWN_OPERATOR, tried.refused)
        elif tried.last_bits and bits().refuses:
            num_chunks, why = 1, Left(Reason.MAY_ROUND, tried.last_bits)
    left = {name: Left(Reason.BY_CAPACITY) for name in OTHER_FORMS if config.asks_for(name)}
    left |= {"chunks": why} if why is not None else {}
    left |= {"chunk_edges": AS_MANY_ROWS} if config.chunk_edges != "even" else {}
    is_unproven = why is not None and why.reason in (Reason.UNKNOWN_OPERATOR, Reason.MAY_ROUND)
    return Planned(
        found=found,
        plan=CapacityPlan(
            group=region.group,
            num_ranks=region.num_ranks,
            num_local_experts=region.num_local_experts,
            num_chunks=num_chunks,
            unproven=why.reason.name if why is not None and is_unproven else "",
        ),
        left=found.verdicts(config, left),
        decision=decision,
        not_priced=layer.not_traced if decision is None else "",
        remarks=(last_bits_remark(tried.last_bits),) if tried.last_bits and num_chunks > 1 else (),
    )


def decide_capacity(
    region: CapacityRegion, config: MegaMoEConfig, hardware: HardwareProfile, layer: TracedNodes
) -> Decision | None:
    """Return the planner's decision, None where it is not asked or has no price."""
    if config.chunks != "auto" or not config.equal_tokens or region.num_local_experts == 1:
        return None
    work = work_of_capacity(region, layer)
    if work is None:
        return None
    return choose(work, ("experts",), lambda _: True, config, hardware)
