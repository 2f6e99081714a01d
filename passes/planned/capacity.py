"""Decide in how many chunks experts with a capacity run.

Contract
    The graph is as the model wrote it, and is not edited.
    Decisions follow from graph, options, profile and sizes of groups: the same on every rank.
"""

from __future__ import annotations

from typing import Final

from moe_compile.config import MegaMoEConfig
from moe_compile.cost.layers import Layers
from moe_compile.cost.traced_nodes import TracedNodes
from moe_compile.journal.entries import Verdict, judged
from moe_compile.journal.reasons import Reason
from moe_compile.plan.chunk_numbers import plan_num_chunks
from moe_compile.plan.decide import decide_capacity
from moe_compile.plan.plan import CapacityPlan
from moe_compile.plan.planned import FoundCapacity, PlannedCapacity
from moe_compile.plan.state import CompileState
from moe_compile.proof.kernel_bits import bits
from moe_compile.regions.token_regions import NotFound
from passes.replay.capacity_trial import Trial, try_chunks
from passes.replay.masked_replay import chunk_bounds

AS_MANY_ROWS: Final = NotFound(
    reason=Reason.ALREADY_DONE, detail="by its capacity every expert has as many rows"
)


def plan_capacity(state: CompileState, layers: Layers) -> tuple[PlannedCapacity, ...]:
    """Return the plan of all experts with a capacity in `state.found`; `layers` are the graph's."""
    return tuple(_planned(one, state, layers.around(one.region)) for one in state.found.capacity)


def _planned(found: FoundCapacity, state: CompileState, layer: TracedNodes) -> PlannedCapacity:
    config, region = state.config, found.region
    decision = decide_capacity(region, config, state.hardware, layer)
    num_chunks, why = plan_num_chunks(config, region, decision)
    if config.chunk_by == "tokens":
        num_chunks, why = 1, NotFound(reason=Reason.BY_CAPACITY)
    tried = Trial()
    if num_chunks > 1:
        tried = try_chunks(region, chunk_bounds(region.num_local_experts, num_chunks))
        if tried.refused:
            num_chunks, why = 1, NotFound(reason=Reason.UNKNOWN_OPERATOR, detail=tried.refused)
        elif tried.last_bits and bits().refuses:
            num_chunks, why = 1, NotFound(reason=Reason.MAY_ROUND, detail=tried.last_bits)
    left = {name: NotFound(reason=Reason.BY_CAPACITY) for name in _others_asked(config)}
    left |= {"chunks": why} if why is not None else {}
    left |= {"chunk_edges": AS_MANY_ROWS} if config.chunk_edges != "even" else {}
    is_unproven = why is not None and why.reason in (Reason.UNKNOWN_OPERATOR, Reason.MAY_ROUND)
    unproven = why.reason.name if why is not None and is_unproven else ""
    return PlannedCapacity(
        found=found,
        plan=CapacityPlan(
            group=region.group,
            num_ranks=region.num_ranks,
            num_local_experts=region.num_local_experts,
            num_chunks=num_chunks,
            unproven=unproven,
        ),
        left={
            option: judged(
                config,
                option,
                Verdict(
                    candidate=region.name,
                    reason=one.reason,
                    detail=one.detail,
                    where=found.where,
                ),
            )
            for option, one in left.items()
        },
        decision=decision,
        not_priced=layer.not_traced if decision is None else "",
        last_bits=tried.last_bits,
    )


def _others_asked(config: MegaMoEConfig) -> list[str]:
    """Return the options for other forms than chunks that are asked for."""
    others = ("dispatch", "nodes", "dispatch_wire", "combine_wire")
    return [name for name in others if config.asks_for(name)]
