"""Attention between exchanges of heads for sequence: it runs in groups of heads.

Contract
    The groups partition the heads, along KV heads; joined, their results are the region's, bit
    for bit, since attention treats heads apart and everything else moves data; where
    `AttentionRegion.may_round`, but for how matrix products and sums over heads round.
    All groups' exchanges are launched before the first attention; gradients of tensors cut in
    groups are concatenated, never summed.
    Everything is emitted just before the attention, so that a selection of its backend holds.
    Attention that is no region is planned as it is, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, Final, TypeAlias

import torch.fx as fx

from moe_compile.attention.attention_regions import AttentionRegion
from moe_compile.attention.detect_attention import find_attention
from moe_compile.config import MegaMoEConfig
from moe_compile.cost.read_regions import work_of_attention
from moe_compile.cost.traced_nodes import Layers, TracedNodes
from moe_compile.graph.edit import Emitter
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.query import source_place, value_of
from moe_compile.hardware import HardwareProfile
from moe_compile.journal.entries import Verdict
from moe_compile.journal.reasons import Kind, Left, Reason
from moe_compile.journal.remedies import changes_for
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.chunk_numbers import (
    AUTO_CHUNKS,
    BY_PRICE,
    ONE_CHUNK,
    NumericalChange,
    last_bits_remark,
)
from moe_compile.plan.decide import choose
from moe_compile.plan.plan import RegionPlan
from moe_compile.plan.planned import Findings, Found, Planned
from moe_compile.plan.state import CompileState
from moe_compile.report.region_reports import (
    CHUNKED,
    AttentionReport,
    decision_figures,
    decision_remarks,
)
from passes.kinds.contract import Emitted, Finds, RegionKind
from passes.replay.factor_pieces import Pieces

Attention: TypeAlias = AttentionRegion | Verdict
OPTION: Final = "attention_chunks"


class ByHeads(RegionKind[Planned[Attention]]):
    """Attention between exchanges of heads for sequence; see the module docstring."""

    name: ClassVar[str] = "attention"

    def find(self, facts: GraphFacts, config: MegaMoEConfig, before: Findings) -> Finds:
        """Return every attention operator, those of regions first."""
        del config, before
        regions, without = find_attention(facts)
        found: list[Found[Attention]] = [
            Found(region=region, where=source_place(region.core)) for region in regions
        ]
        for core, why in without.items():
            none = Verdict(candidate=core.name, reason=why.reason, detail=why.detail)
            found.append(Found(region=none, where=source_place(core)))
        launches = frozenset(launch.name for region in regions for launch in region.launches)
        return Finds(found=tuple(found), exchanges=launches)

    def plan(self, state: CompileState, layers: Layers) -> tuple[Planned[Attention], ...]:
        """Return the plan of every attention operator."""
        found = state.found.by_kind[self.name]
        return tuple(_planned(one, one.region, state, layers) for one in found)

    def emit(self, one: Planned[Attention], state: CompileState) -> Emitted:
        """Emit attention in groups of heads."""
        del state
        region = one.found.region
        assert isinstance(region, AttentionRegion)
        body = sorted({*region.body})
        result = emit_head_groups(region, one.plan.num_chunks)
        return Emitted(instead={region.result: result}, body=body)

    def say(self, one: Planned[Attention], config: MegaMoEConfig) -> AttentionReport:
        """Return the report on one attention operator."""
        del config
        region, why = one.found.region, one.left.get(OPTION)
        sizes = (1, 0, 0)
        if isinstance(region, AttentionRegion):
            sizes = region.num_ranks, region.num_heads, region.num_kv_heads
        return AttentionReport(
            name=one.found.name,
            where=one.found.where,
            is_region=bool(one.plan.group),
            num_ranks=sizes[0],
            num_heads=sizes[1],
            num_kv_heads=sizes[2],
            num_chunks=one.plan.num_chunks,
            verdict=why.why if why else CHUNKED,
            decision=decision_figures(one.decision),
            remarks=(*decision_remarks(one.decision), *one.remarks),
            to_do=changes_for(left.reason for left in one.left.values()),
        )


def _planned(
    found: Found[Attention], region: Attention, state: CompileState, layers: Layers
) -> Planned[Attention]:
    config = state.config
    if isinstance(region, Verdict):
        unproven = region.reason.name if region.reason.kind is Kind.UNPROVEN else ""
        plan, left = (
            RegionPlan(group="", unproven=unproven),
            found.verdicts(config, {OPTION: Left(region.reason, region.detail)}),
        )
        return Planned(found=found, plan=plan, option=OPTION, left=left)
    decision = decide_attention(region, config, state.hardware, layers.around(region))
    num_groups, why = plan_head_groups(config, region, decision)
    return Planned(
        found=found,
        plan=RegionPlan(group=region.group, num_chunks=num_groups),
        option=OPTION,
        left=found.verdicts(config, {OPTION: why}),
        decision=decision,
        remarks=tuple(_remarks(region, num_groups)),
    )


def decide_attention(
    region: AttentionRegion, config: MegaMoEConfig, hardware: HardwareProfile, layer: TracedNodes
) -> Decision | None:
    """Return the planner's decision, None where it is not asked or has no price."""
    rounds = region.rounds and not config.allows("lossy")
    if config.attention_chunks != "auto" or not config.equal_tokens or rounds:
        return None
    work = work_of_attention(region, layer)
    if work is None:
        return None

    def is_allowed(candidate: Candidate) -> bool:
        return config.allows("lossy") or not region.may_round(candidate.num_chunks)

    return choose(work, ("heads",), is_allowed, config, hardware)


def plan_head_groups(
    config: MegaMoEConfig, region: AttentionRegion, decision: Decision | None = None
) -> tuple[int, Left | None]:
    """Return the number of groups of heads for `region`, and why it is one; None if it is not.

    "auto" changes no bit, and takes the planner's decision; without one, two groups where the local
    KV heads are even in number, one group where not.
    """
    asked = config.attention_chunks
    if asked == 1:
        return 1, ONE_CHUNK
    if region.head is None:
        return 1, Left(Reason.FEW_KV_HEADS, "one local KV head")
    must_keep = asked == "auto" and not config.allows("lossy")
    if must_keep and region.rounds:
        return 1, Left(Reason.MAY_ROUND)
    if asked == "auto" and decision is not None:
        num_groups = decision.chosen.candidate.num_chunks
        return num_groups, BY_PRICE if num_groups == 1 else None
    num_groups = AUTO_CHUNKS if asked == "auto" else int(asked)
    if region.head.size % num_groups:
        detail = f"{region.head.size} heads cannot be divided into {num_groups} equal groups"
        return 1, Left(Reason.FEW_KV_HEADS, detail)
    if must_keep and region.may_round(num_groups):
        return 1, Left(Reason.MAY_ROUND)
    return num_groups, None


def _remarks(region: AttentionRegion, num_groups: int) -> Iterator[str]:
    if region.may_round(num_groups):
        yield NumericalChange.HEADS.value
    elif why := region.why_last_bits(num_groups):
        yield last_bits_remark(why)


def emit_head_groups(region: AttentionRegion, num_groups: int) -> fx.Node:
    """Emit a region in `num_groups` groups of heads; return the replacement of its result."""
    assert region.head is not None
    share = region.head.size // num_groups
    pieces = Pieces(Emitter(region.core), region.tracker, region.head, [share] * num_groups)
    envs: list[dict[fx.Node, fx.Node]] = [{} for _ in range(num_groups)]

    def replay(nodes: Iterable[fx.Node], env: dict[fx.Node, fx.Node]) -> None:
        for node in nodes:
            pieces.replay(node, env, share)

    for source in region.cut:
        for env, piece in zip(envs, pieces.cut(source), strict=True):
            env[source] = piece
    for env in envs:
        replay(region.exchanges, env)
    for env in envs:
        replay((*region.inward, region.core, *region.outward), env)
    whole: fx.Node = pieces.join([env[region.result] for env in envs], region.result)
    whole.meta["example_value"] = value_of(region.result)
    return whole
