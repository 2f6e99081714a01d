"""Replay an attention region on groups of heads.

Contract
    The groups partition the heads, along KV heads; joined, their results are the region's, bit
    for bit, since attention treats heads apart and everything else moves data; where
    `AttentionRegion.may_round`, but for how matrix products and sums over heads round.
    All groups' exchanges are launched before the first attention; gradients of what is cut in
    groups are concatenated, never summed.
    Everything is emitted just before the attention, so that a selection of its backend holds.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx as fx

from moe_compile.attention.attention_regions import AttentionRegion
from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import value_of
from passes.replay.factor_pieces import Pieces


def emit_head_groups(region: AttentionRegion, num_groups: int) -> fx.Node:
    """Emit a region in `num_groups` groups of heads; return what takes its result's place."""
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
