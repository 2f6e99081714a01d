"""Split attention between exchanges in groups of heads, so that one group's exchanges can run
under another group's attention.

Contract
    Requires  WAITS_VISIBLE.
    Provides  ATTENTION_FOUND.
    Keeps     every value and gradient bit for bit, unless torch rounds by how many heads there
              are (see `AttentionRegion.may_round`) or `attention_split` asks for projections
              to be cut too; the selection of an attention backend.
    Every attention of the graph is noted in the state with its verdict, split or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch.fx as fx

from moe_compile.analysis.attention_regions import AttentionRefusal, AttentionRegion
from moe_compile.analysis.detect_attention import find_attention
from moe_compile.analysis.head_split import HeadSplit, split_projections
from moe_compile.graph.edit import erase_unused, replace_uses
from moe_compile.graph.query import source_place, tensor_of
from moe_compile.planning.plan import SplitBound, plan_head_groups
from moe_compile.planning.state import AttentionVerdict, CompileState
from passes.contract import Fact, GraphPass, PassReport, Verdict
from passes.replay.head_groups import emit_head_groups

ROUNDING: Final = (
    "last bits may differ by group: of torch's kernel for these sizes, layouts, masks and "
    "backends, or of the gradient of what no exchange brings"
)


@dataclass(frozen=True)
class ChunkAttention(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "chunk_attention"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.WAITS_VISIBLE})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.ATTENTION_FOUND})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Replay each region whose heads the option splits; note all of them."""
        regions, refused = find_attention(graph)
        for region in regions:
            state.tell_apart(region.launches)
        decisions = [state.attention_decisions.get(region.name) for region in regions]
        pairs = list(zip(regions, decisions, strict=True))
        plans = [(r, *plan_head_groups(state.config, r, decision)) for r, decision in pairs]
        skipped = [
            Verdict(candidate=region.name, reason=reason)
            for region, _, reason in plans
            if reason is not None
        ]
        skipped += [Verdict(candidate=r.name, reason=r.reason, detail=r.detail) for r in refused]
        which = state.config.attention_split
        chosen = [
            (split_projections(r, qkv=which in ("qkv", "both"), out=which in ("out", "both")), num)
            for r, num, reason in plans
            if reason is None
        ]
        splits = {split.region.core: split for split, _ in chosen}
        state.attention = [
            replace(_verdict(*plan, splits.get(plan[0].core)), decision=decision)
            for plan, decision in zip(plans, decisions, strict=True)
        ] + [
            AttentionVerdict(
                name=r.name,
                where=source_place(r.core),
                reason=r.reason,
                detail=r.detail,
                device=_device(r.core),
                tp_groups=r.groups,
            )
            for r in refused
        ]
        launches = {launch.name for region in regions for launch in region.launches}
        state.decoys = [d for d in state.decoys if d.candidate not in launches]
        for split, num_groups in reversed(chosen):  # so that what a region reads is still there
            _apply(split, num_groups)
        return PassReport(
            pass_name=self.name,
            applied=tuple(split.region.name for split, _ in chosen),
            skipped=tuple(skipped),
        )


def _verdict(
    region: AttentionRegion,
    num_groups: int,
    reason: AttentionRefusal | None,
    split: HeadSplit | None,
) -> AttentionVerdict:
    return AttentionVerdict(
        name=region.name,
        where=source_place(region.core),
        reason=reason,
        is_region=True,
        group=region.group,
        num_ranks=region.num_ranks,
        num_heads=region.num_heads,
        num_kv_heads=region.num_kv_heads,
        num_chunks=num_groups,
        rounding=ROUNDING if split and region.may_round(num_groups) else "",
        projections_cut=tuple(_cut_projections(split)) if split else (),
        projections_whole=split.kept_whole if split else (),
    )


def _device(core: fx.Node) -> str:
    tensor = tensor_of(core)
    return tensor.device.type if tensor is not None else ""


def _cut_projections(split: HeadSplit) -> Iterator[str]:
    if split.projections:
        yield SplitBound.QKV.value
    if split.output is not None:
        yield SplitBound.OUT.value


def _apply(split: HeadSplit, num_groups: int) -> None:
    in_order = {node: i for i, node in enumerate(split.region.core.graph.nodes)}
    body = sorted(set(split.body), key=in_order.__getitem__)
    replace_uses({split.result: emit_head_groups(split, num_groups)})
    erase_unused(body)
