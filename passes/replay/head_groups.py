"""Replay an attention region on groups of heads.

Contract
    The groups partition the heads, along KV heads; joined, their results are the region's, bit
    for bit, since attention treats heads apart and everything else moves data; where
    `AttentionRegion.may_round`, but for how matrix products and sums over heads round.
    All groups' exchanges are launched before the first attention; gradients of what is cut in
    groups are concatenated, never summed.
    Projections cut by heads are no more bit for bit: gradients of what all groups read, and the
    result of the output projection, are sums over groups.
    Everything is emitted just before the attention, so that a selection of its backend holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.fx as fx
import torch.nn.functional as F

from moe_compile.attention.attention_regions import AttentionRegion
from moe_compile.attention.head_factors import Factor
from moe_compile.attention.head_split import HeadSplit
from moe_compile.attention.linear_layers import Linear
from moe_compile.graph.edit import Emitter, recompute_between
from moe_compile.graph.query import value_of
from passes.replay.factor_pieces import Pieces


def emit_head_groups(split: HeadSplit, num_groups: int) -> fx.Node:
    """Emit a region in `num_groups` groups of heads; return what takes its result's place."""
    region = split.region
    assert region.head is not None
    groups = _Groups(Emitter(region.core), region, region.head, num_groups)
    envs: list[dict[fx.Node, fx.Node]] = [{} for _ in range(num_groups)]
    for source in split.cut:
        for env, piece in zip(envs, groups.pieces.cut(source), strict=True):
            env[source] = piece
    weights = [groups.cut_features(linear, linear.node) for linear in split.projections]
    for c, env in enumerate(envs):
        for linear, pieces in zip(split.projections, weights, strict=True):
            env[linear.node] = groups.multiply(linear, linear.x, pieces[c])
        groups.replay((*split.path, *region.exchanges), env)
    for env in envs:
        groups.replay((*region.inward, region.core, *region.outward, *split.after), env)
    if split.output is not None:
        return groups.add(split.output, [env[split.output.x] for env in envs])
    whole: fx.Node = groups.pieces.join([env[region.result] for env in envs], region.result)
    whole.meta["example_value"] = value_of(region.result)
    return whole


@dataclass(frozen=True, slots=True)
class _Weights:
    """A group's share of the weights of a product."""

    matrix: fx.Node
    bias: fx.Node | None


class _Groups:
    """Emits the pieces of one region."""

    def __init__(
        self, emit: Emitter, region: AttentionRegion, head: Factor, num_groups: int
    ) -> None:
        self._emit, self._region, self._num_groups = emit, region, num_groups
        self._share = head.size // num_groups
        shares = [self._share] * num_groups
        self.pieces = Pieces(emit, region.tracker, head, shares)

    def replay(self, nodes: Iterable[fx.Node], env: dict[fx.Node, fx.Node]) -> None:
        """Emit `nodes` for one group, their sizes those of the group."""
        for node in nodes:
            self.pieces.replay(node, env, self._share)

    def cut_features(self, linear: Linear, features: fx.Node) -> list[_Weights]:
        """Emit every group's share of a weight: that of the heads in the last dimension of
        `features`, which is what `linear` makes or what it reads.

        Shares are copies: kept for the backward pass they would be the weights once more."""
        dim = self._region.tracker.dims(features)[-1]
        makes = features is linear.node
        other = [Factor(int(value_of(linear.weight).shape[linear.by_rows is makes]))]
        dims = [dim, other] if linear.by_rows is makes else [other, dim]
        weights = self.pieces.cut(linear.weight, dims)
        recompute_between(linear.weight, weights)
        biases: list[fx.Node | None] = [linear.bias] + [None] * (self._num_groups - 1)
        if makes and linear.bias is not None:
            biases = [*self.pieces.cut(linear.bias, [dim])]
        return [_Weights(*pair) for pair in zip(weights, biases, strict=True)]

    def multiply(self, linear: Linear, x: fx.Node, weights: _Weights) -> fx.Node:
        """Emit `linear` of `x` with a share of its weights."""
        if linear.by_rows:
            return self._emit.call(F.linear, x, weights.matrix, weights.bias)
        return self._emit.call(torch.matmul, x, weights.matrix)

    def add(self, linear: Linear, parts: list[fx.Node]) -> fx.Node:
        """Emit `linear` of all groups as the sum of what each of them adds."""
        total: fx.Node | None = None
        for x, weights in zip(parts, self.cut_features(linear, linear.x), strict=True):
            part = self.multiply(linear, x, weights)
            total = part if total is None else self._emit.call(torch.add, total, part)
        assert total is not None
        total.meta["example_value"] = value_of(linear.node)
        return total
