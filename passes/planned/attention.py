"""Decide in how many groups of heads attention runs, and what becomes of its collectives.

Contract
    The graph is as the model wrote it, and is not edited.
    Decisions follow from graph, options, profile and sizes of groups: the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_compile.attention.attention_regions import AttentionRefused, AttentionRegion
from moe_compile.attention.head_split import HeadSplit, split_projections
from moe_compile.config import MegaMoEConfig
from moe_compile.cost.layers import Layers
from moe_compile.graph.async_tp import AsyncTPMeans, probe_means
from moe_compile.journal.entries import Verdict, judged
from moe_compile.journal.kinds import Kind
from moe_compile.journal.reasons import Reason
from moe_compile.plan.chunk_numbers import Bound, plan_head_groups
from moe_compile.plan.decide import decide_attention
from moe_compile.plan.plan import AttentionPlan
from moe_compile.plan.planned import FoundAttention, PlannedAttention
from moe_compile.plan.state import CompileState


def plan_attention(state: CompileState, layers: Layers) -> tuple[PlannedAttention, ...]:
    """Return the plan of every attention operator in `state.found`; `layers` are the graph's."""
    found = state.found.attention
    groups = {g for f in found for g in _tp_groups(f)}
    means = probe_means(groups) if groups else AsyncTPMeans()
    return tuple(
        _region(one, one.region, state, layers)
        if isinstance(one.region, AttentionRegion)
        else _no_region(one, one.region, state.config, means)
        for one in found
    )


def _tp_groups(found: FoundAttention) -> tuple[str, ...]:
    return found.region.groups if isinstance(found.region, AttentionRefused) else ()


def _region(
    found: FoundAttention,
    region: AttentionRegion,
    state: CompileState,
    layers: Layers,
) -> PlannedAttention:
    config = state.config
    decision = decide_attention(region, config, state.hardware, layers.around(region))
    num_groups, reason = plan_head_groups(config, region, decision)
    split, left = None, dict[str, Verdict]()
    if reason is None:
        which = config.attention_split
        split = split_projections(
            region, qkv=which in ("qkv", "both"), out=which in ("out", "both")
        )
        for what, why, detail in split.kept_whole:
            verdict = Verdict(
                candidate=f"{what} of {region.name}", reason=why, detail=detail, where=found.where
            )
            left[what] = judged(config, "attention_split", verdict)
    else:
        verdict = Verdict(candidate=region.name, reason=reason, where=found.where)
        left["attention_chunks"] = judged(config, "attention_chunks", verdict)
    return PlannedAttention(
        found=found,
        plan=AttentionPlan(
            group=region.group,
            num_chunks=num_groups,
            projects_qkv=split is not None and bool(split.projections),
            projects_out=split is not None and split.output is not None,
        ),
        split=split,
        left=left,
        decision=decision,
        remarks=tuple(_bounds(region, split, num_groups)),
    )


def _bounds(region: AttentionRegion, split: HeadSplit | None, num_groups: int) -> Iterator[str]:
    """Return what groups of heads may change."""
    if split is None:
        return
    if region.may_round(num_groups):
        yield Bound.HEADS.value
    if split.projections:
        yield Bound.QKV.value
    if split.output is not None:
        yield Bound.OUT.value


def _no_region(
    found: FoundAttention, refused: AttentionRefused, config: MegaMoEConfig, means: AsyncTPMeans
) -> PlannedAttention:
    why = Verdict(
        candidate=refused.name, reason=refused.reason, detail=refused.detail, where=found.where
    )
    left = {"attention_chunks": judged(config, "attention_chunks", why)}
    kept = not_handed_over(found, refused, config, means) if refused.groups else None
    if kept is not None:
        left["async_tp"] = Verdict(candidate=refused.name, reason=kept)
    unproven = refused.reason.name if refused.reason.kind is Kind.UNPROVEN else ""
    is_handed_over = bool(refused.groups) and kept is None
    return PlannedAttention(
        found=found,
        plan=AttentionPlan(is_handed_over=is_handed_over, unproven=unproven),
        left=left,
    )


def not_handed_over(
    found: FoundAttention, refused: AttentionRefused, config: MegaMoEConfig, means: AsyncTPMeans
) -> Reason | None:
    """Return why attention under tensor parallelism is not left to Inductor's async TP.

    What a process has for it is the same on every rank once ranks agreed on it (see
    moe_compile/group_setup.py); where they did not, the decision is among those that they compare.
    """
    missing = (
        (not config.async_tp, Reason.NOT_ASKED),
        (config.codegen != "inductor", Reason.NO_CODE),
        (not means.has_setting, Reason.NO_SETTING),
        (found.device != "cuda", Reason.NOT_CUDA),
        (not means.has_nccl, Reason.NO_NCCL),
        (not means.enabled_groups.issuperset(refused.groups), Reason.NOT_ENABLED),
    )
    return next((why for lacks, why in missing if lacks), None)
