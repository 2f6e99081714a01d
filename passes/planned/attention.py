"""Decide in how many groups of heads attention runs, and what becomes of its collectives.

Contract
    The graph is as the model wrote it, and is not edited.
    Decisions follow from graph, options, profile and sizes of groups: the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_compile.attention.attention_regions import AttentionRefused, AttentionRegion
from moe_compile.config import MegaMoEConfig
from moe_compile.cost.layers import Layers
from moe_compile.journal.entries import Verdict, judged
from moe_compile.journal.kinds import Kind
from moe_compile.plan.chunk_numbers import Bound, last_bits_remark, plan_head_groups
from moe_compile.plan.decide import decide_attention
from moe_compile.plan.plan import AttentionPlan
from moe_compile.plan.planned import FoundAttention, PlannedAttention
from moe_compile.plan.state import CompileState


def plan_attention(state: CompileState, layers: Layers) -> tuple[PlannedAttention, ...]:
    """Return the plan of every attention operator in `state.found`; `layers` are the graph's."""
    return tuple(
        _region(one, one.region, state, layers)
        if isinstance(one.region, AttentionRegion)
        else _no_region(one, one.region, state.config)
        for one in state.found.attention
    )


def _region(
    found: FoundAttention,
    region: AttentionRegion,
    state: CompileState,
    layers: Layers,
) -> PlannedAttention:
    config = state.config
    decision = decide_attention(region, config, state.hardware, layers.around(region))
    num_groups, why = plan_head_groups(config, region, decision)
    left = dict[str, Verdict]()
    if why is not None:
        verdict = Verdict(
            candidate=region.name, reason=why.reason, detail=why.detail, where=found.where
        )
        left["attention_chunks"] = judged(config, "attention_chunks", verdict)
    return PlannedAttention(
        found=found,
        plan=AttentionPlan(group=region.group, num_chunks=num_groups),
        left=left,
        decision=decision,
        remarks=tuple(_remarks(region, num_groups)),
    )


def _remarks(region: AttentionRegion, num_groups: int) -> Iterator[str]:
    if region.may_round(num_groups):
        yield Bound.HEADS.value
    elif why := region.why_last_bits(num_groups):
        yield last_bits_remark(why)


def _no_region(
    found: FoundAttention, refused: AttentionRefused, config: MegaMoEConfig
) -> PlannedAttention:
    why = Verdict(
        candidate=refused.name, reason=refused.reason, detail=refused.detail, where=found.where
    )
    left = {"attention_chunks": judged(config, "attention_chunks", why)}
    unproven = refused.reason.name if refused.reason.kind is Kind.UNPROVEN else ""
    return PlannedAttention(found=found, plan=AttentionPlan(unproven=unproven), left=left)
