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

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx
import torch.nn.functional as F

from moe_compile.attention.attention_regions import AttentionRegion
from moe_compile.attention.head_factors import Dims, Factor, flat, group_size, holds, size_of
from moe_compile.attention.head_split import HeadSplit
from moe_compile.attention.head_tracking import CUTS, cut_dim, is_form, move_name
from moe_compile.attention.linear_layers import Linear
from moe_compile.attention.move_arguments import moved
from moe_compile.graph.edit import Emitter, recompute_between
from moe_compile.graph.query import is_launch, value_of


def emit_head_groups(split: HeadSplit, num_groups: int) -> fx.Node:
    """Emit a region in `num_groups` groups of heads; return what takes its result's place."""
    region = split.region
    assert region.head is not None
    groups = _Groups(Emitter(region.core), region, region.head, num_groups)
    envs: list[dict[fx.Node, fx.Node]] = [{} for _ in range(num_groups)]
    for source in split.cut:
        for env, piece in zip(envs, groups.cut(source), strict=True):
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
    return groups.join([env[region.result] for env in envs])


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
        self._emit, self._region = emit, region
        self._head, self._num_groups = head, num_groups

    def cut(self, source: fx.Node) -> list[fx.Node]:
        """Emit every group's piece of `source`."""
        return self._cut(source, self._region.tracker.dims(source))

    def _cut(self, source: fx.Node, dims: Dims) -> list[fx.Node]:
        along = next(i for i, dim in enumerate(dims) if holds(dim, self._head))
        at = next(i for i, f in enumerate(dims[along]) if holds([f], self._head))
        outer, factor, inner = dims[along][:at], dims[along][at], dims[along][at + 1 :]
        opened = [*dims[:along], outer, [factor], inner, *dims[along + 1 :]]
        emit, middle = self._emit, along + 1
        whole = emit.method("reshape", source, [size_of(dim) for dim in opened])
        if factor.pieces:
            pieces = self._cut_pieces(whole, opened, middle, factor)
        else:
            parts = emit.call(torch.split, whole, factor.size // self._num_groups, middle)
            pieces = [emit.call(operator.getitem, parts, c) for c in range(self._num_groups)]
        return [emit.method("reshape", piece, self._sizes(dims)) for piece in pieces]

    def _cut_pieces(self, whole: fx.Node, dims: Dims, along: int, factor: Factor) -> list[fx.Node]:
        """Emit every group's piece of a concatenation: of each of its parts, joined again."""
        emit = self._emit
        parts = emit.call(torch.split, whole, [size_of(p) for p in factor.pieces], along)
        columns: list[list[fx.Node]] = []
        for i, piece in enumerate(factor.pieces):
            part = emit.call(operator.getitem, parts, i)
            own = [*dims[:along], flat(piece), *dims[along + 1 :]]
            cut = self._cut(part, own) if holds(piece, self._head) else [part] * self._num_groups
            columns.append(cut)
        return [emit.call(torch.cat, list(row), along) for row in zip(*columns, strict=True)]

    def replay(self, nodes: Iterable[fx.Node], env: dict[fx.Node, fx.Node]) -> None:
        """Emit `nodes` for one group, their sizes those of the group."""
        for node in nodes:
            self._replay(node, env)

    def _replay(self, node: fx.Node, env: dict[fx.Node, fx.Node]) -> None:
        emit = self._emit
        if is_form(node):
            env[node] = emit.method("reshape", _source(node, env), self._sizes_of(node))
        elif move_name(node) == "expand":
            env[node] = emit.method("expand", _source(node, env), self._sizes_of(node))
        elif move_name(node) in CUTS:
            pieces = self._cut_sizes(node)
            env[node] = emit.call(torch.split, _source(node, env), pieces, cut_dim(node))
        elif is_launch(node):
            exchanged = emit.method("contiguous", _source(node, env))
            env[node] = emit.copy(node, {**env, moved(node): exchanged})
            self._resplit(env[node], node)
        else:
            env[node] = emit.copy(node, env)

    def _resplit(self, copied: fx.Node, node: fx.Node) -> None:
        """Give an exchange the rows of one group."""
        rows = self._sizes_of(node)[0] // self._region.num_ranks
        splits = [rows] * self._region.num_ranks
        copied.args = (copied.args[0], splits, splits, *copied.args[3:])

    def _sizes(self, dims: Dims) -> list[int]:
        return [group_size(dim, self._head, self._num_groups) for dim in dims]

    def _sizes_of(self, node: fx.Node) -> list[int]:
        return self._sizes(self._region.tracker.dims(node))

    def _cut_sizes(self, node: fx.Node) -> list[int]:
        """Return the sizes of the pieces that a split has for one group, in order."""
        along, tracker = cut_dim(node), self._region.tracker
        pieces = range(len(value_of(node)))
        return [self._sizes(tracker.piece_read(node, i))[along] for i in pieces]

    def cut_features(self, linear: Linear, features: fx.Node) -> list[_Weights]:
        """Emit every group's share of a weight: that of the heads in the last dimension of
        `features`, which is what `linear` makes or what it reads.

        Shares are copies: kept for the backward pass they would be the weights once more."""
        dim = self._region.tracker.dims(features)[-1]
        makes = features is linear.node
        other = [Factor(int(value_of(linear.weight).shape[linear.by_rows is makes]))]
        dims = [dim, other] if linear.by_rows is makes else [other, dim]
        weights = self._cut(linear.weight, dims)
        recompute_between(linear.weight, weights)
        biases: list[fx.Node | None] = [linear.bias] + [None] * (self._num_groups - 1)
        if makes and linear.bias is not None:
            biases = [*self._cut(linear.bias, [dim])]
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

    def join(self, results: list[fx.Node]) -> fx.Node:
        """Emit the results of all groups as one."""
        dims = self._region.tracker.dims(self._region.result)
        along = next(i for i, dim in enumerate(dims) if holds(dim, self._head))
        at = dims[along].index(self._head)
        outer, inner = dims[along][:at], dims[along][at + 1 :]
        opened = [*dims[:along], outer, [self._head], inner, *dims[along + 1 :]]
        emit = self._emit
        parts = [emit.method("reshape", r, self._sizes(opened)) for r in results]
        joined = emit.call(torch.cat, parts, along + 1)
        whole = emit.method("reshape", joined, [size_of(dim) for dim in dims])
        whole.meta["example_value"] = value_of(self._region.result)
        return whole


def _source(node: fx.Node, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Return a group's part of what `node` moves, or the whole where groups share it."""
    return env.get(moved(node), moved(node))
