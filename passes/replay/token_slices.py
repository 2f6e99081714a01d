"""Replay experts that pick rows of gathered tokens slice by slice of a rank's tokens.

Contract
    Requires  a `PickingRegion`, which proves that rows stay apart, and slices of equal length.
    Every slice is gathered (where nothing else reads the gathered tokens), run and reduced by
    itself. Rows of a slice keep their order, so sums per token add up the same rows in the same
    order; the gradient of a weight is a product over the rows of all slices at once, in the order
    that they had.
    Order     the first gather where the model's stands, the others behind what the model gathers to
              tell the experts of tokens; all else where its reduction stands: one read of
              how many rows each expert has in each slice, the experts, the reductions.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import C10D, tensor_of, value_of
from moe_compile.ops.gradient_beside import GRADIENT_BESIDE
from moe_compile.ops.permute import PERMUTE_ROWS
from moe_compile.picking.picking_regions import Picked, PickingRegion
from moe_compile.picking.row_index import is_mask
from moe_compile.picking.row_sums import Put
from passes.replay.host_reads import ASSERT, BulkRead
from passes.replay.sizes import name_inferred_size


@dataclass(frozen=True, slots=True)
class TokenSlices:
    """What a region became."""

    result: fx.Node
    gathers: tuple[fx.Node, ...]
    """Launches that gather the tokens of each slice; none where they stay gathered at once."""
    reduces: tuple[fx.Node, ...]


@dataclass(slots=True)
class _Rows:
    """The rows of one expert, by slice."""

    expert: Picked
    order: fx.Node
    """The rows in the order of slices."""
    inverse: fx.Node
    tokens: fx.Node
    """Token of each row among those of its slice, in the order of slices."""
    counts: list[int]
    """Numbers in the one host read: rows in each slice."""
    is_in: fx.Node
    """Which rows are of which slice, `[slices, rows]`."""
    sizes: list[fx.Node] = field(default_factory=list)
    whole: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Value of the body -> all its rows, in their order, without gradient."""
    detached: dict[fx.Node, fx.Node] = field(default_factory=dict)


def emit_token_slices(region: PickingRegion, num_slices: int) -> TokenSlices:
    """Emit the region in so many slices; the old one is for the caller to take out."""
    gathers = _launch_gathers(region, num_slices) if region.is_alone else []
    return _Writer(region, num_slices).write(gathers)


def _launch_gathers(region: PickingRegion, num_slices: int) -> list[fx.Node]:
    """Read the tokens where the model does: their gradients meet in the order they had.

    What the host reads of the routing would otherwise wait until all slices are there.
    """
    emit, later = Emitter(region.gather), Emitter(region.behind_routing)
    split = emit.call(torch.split, region.tokens, region.num_tokens // num_slices)
    parts = [emit.call(operator.getitem, split, c) for c in range(num_slices)]
    parts = [emit.method("contiguous", part) for part in parts]
    first, *others = parts
    launches = [emit.copy(region.gather, {region.tokens: first})]
    return launches + [later.copy(region.gather, {region.tokens: part}) for part in others]


class _Writer:
    """Emits one region where its sums are reduced."""

    def __init__(self, region: PickingRegion, num_slices: int) -> None:
        self._region, self._num = region, num_slices
        self._length = region.num_tokens // num_slices
        self._emit = Emitter(region.reduce)

    def write(self, gathers: list[fx.Node]) -> TokenSlices:
        """Emit all that stands where the sums are reduced."""
        emit, region = self._emit, self._region
        rows = self._place_rows()
        tokens = [emit.call(C10D.wait_tensor, launch) for launch in gathers] or self._cut_tokens()
        sums = [self._zeros(part) for part in tokens]
        for one in rows:
            sums = self._run(one, tokens, sums)
        for node in (*region.tail, region.reduce):
            (written,) = node.all_input_nodes
            sums = [emit.copy(node, {written: part}) for part in sums]
        reduces = sums
        result = emit.call(torch.cat, [emit.call(C10D.wait_tensor, launch) for launch in reduces])
        result.meta["example_value"] = value_of(region.result)
        return TokenSlices(result, tuple(gathers), tuple(reduces))

    def _cut_tokens(self) -> list[fx.Node]:
        """Emit the slices of tokens that are gathered at once, of which others read too."""
        emit, region = self._emit, self._region
        by_rank = emit.method("unflatten", region.everyone, 0, (region.num_ranks, self._num, -1))
        parts = emit.method("unbind", by_rank, 1)
        each = (emit.call(operator.getitem, parts, c) for c in range(self._num))
        return [emit.method("flatten", part, 0, 1) for part in each]

    def _zeros(self, tokens: fx.Node) -> fx.Node:
        whole = tensor_of(self._region.zeros)
        assert whole is not None
        shape = (whole.shape[0] // self._num, *whole.shape[1:])
        return self._emit.method("new_zeros", tokens, shape, dtype=whole.dtype)

    def _place_rows(self) -> list[_Rows]:
        """Emit where the rows of every expert stand, and the one read of how many those are."""
        reads = BulkRead(self._emit)
        rows = [self._placed(expert, reads) for expert in self._region.experts]
        values = reads.finish()
        for one in rows:
            one.sizes = [values[number] for number in one.counts]
            num_rows = self._emit.method("size", one.order, 0)
            total = self._emit.call(torch.sym_sum, one.sizes)
            is_all = self._emit.call(operator.eq, total, num_rows)
            self._emit.call(ASSERT, is_all, "slices do not make up the rows")
        return rows

    def _placed(self, expert: Picked, reads: BulkRead) -> _Rows:
        emit, given = self._emit, tensor_of(expert.index)
        assert given is not None
        index = expert.index
        if is_mask(index):
            index = emit.call(operator.getitem, emit.call(torch.where, index), 0)
        rank = emit.call(operator.floordiv, index, self._region.num_tokens)
        place = emit.call(operator.mod, index, self._region.num_tokens)
        slice_of = emit.call(operator.floordiv, place, self._length)
        ahead = emit.call(operator.mul, rank, self._length)
        token = emit.call(operator.add, ahead, emit.call(operator.mod, place, self._length))
        order = emit.call(torch.argsort, slice_of, stable=True)
        every = emit.call(torch.arange, self._num, device=given.device)
        is_in = emit.call(operator.eq, emit.method("unsqueeze", every, 1), slice_of)
        return _Rows(
            expert=expert,
            order=order,
            inverse=emit.call(torch.argsort, order),
            tokens=emit.call(operator.getitem, token, order),
            counts=reads.add_vector(emit.method("sum", is_in, 1), self._num),
            is_in=is_in,
        )

    def _split(self, rows: fx.Node, sizes: list[fx.Node], dim: int = 0) -> Iterator[fx.Node]:
        parts = self._emit.call(torch.split, rows, sizes, dim)
        return (self._emit.call(operator.getitem, parts, c) for c in range(self._num))

    def _run(self, one: _Rows, tokens: list[fx.Node], sums: list[fx.Node]) -> list[fx.Node]:
        """Emit an expert on each slice; return what the sums of each are then."""
        expert = one.expert
        envs: list[dict[fx.Node, Any]] = [
            {self._region.everyone: part, **dict.fromkeys(expert.indices, index)}
            for part, index in zip(tokens, self._split(one.tokens, one.sizes), strict=True)
        ]
        self._give(one, envs)
        for node in expert.body:
            weights = [i for i in node.all_input_nodes if i in expert.weights]
            for weight in weights:
                self._detach(weight, one, envs)
            made = [self._copy(node, env) for env in envs]
            if weights:
                made = self._with_gradient(node, made, one, envs)
            for env, value in zip(envs, made, strict=True):
                env[node] = value
        return [self._put(expert.put, env, part) for env, part in zip(envs, sums, strict=True)]

    def _put(self, put: Put, env: dict[fx.Node, Any], sums: fx.Node) -> fx.Node:
        """Emit the addition to the sums of a slice; return what they are then."""
        env = {**env, put.before: sums}
        for node in put.nodes:
            env[node] = self._emit.copy(node, env)
        return sums if put.is_in_place else env[put.nodes[-1]]

    def _give(self, one: _Rows, envs: list[dict[fx.Node, Any]]) -> None:
        """Emit each slice's part of what the expert reads beside the rows."""
        expert, emit = one.expert, self._emit
        for source in expert.by_row:
            by_slice = emit.call(PERMUTE_ROWS, source, one.order, one.inverse)
            for env, part in zip(envs, self._split(by_slice, one.sizes), strict=True):
                env[source] = part
        for source in expert.offsets:
            ends = self._ends(source, one)
            for c, env in enumerate(envs):
                env[source] = emit.call(operator.getitem, ends, c)

    def _ends(self, offsets: fx.Node, one: _Rows) -> fx.Node:
        """Emit where the groups of each slice end: as many of its rows stand before that place."""
        emit, ends = self._emit, tensor_of(offsets)
        assert ends is not None
        so_far = emit.call(torch.cumsum, one.is_in, 1, dtype=ends.dtype)
        before = emit.call(F.pad, so_far, (1, 0))
        return emit.call(operator.getitem, before, (slice(None), offsets))

    def _copy(self, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
        copied = self._emit.copy(node, env)
        name_inferred_size(copied, node)
        return copied

    def _detach(self, weight: fx.Node, one: _Rows, envs: list[dict[fx.Node, Any]]) -> None:
        if weight not in one.detached:
            one.detached[weight] = self._emit.method("detach", weight)
        for env in envs:
            env[weight] = one.detached[weight]

    def _with_gradient(
        self, node: fx.Node, made: list[fx.Node], one: _Rows, envs: list[dict[fx.Node, Any]]
    ) -> list[fx.Node]:
        """Emit `node` on all rows, for the gradients of weights; hand it those of the slices."""
        emit, weights = self._emit, one.expert.weights
        alike = {*weights, *one.expert.offsets}
        read = [i for i in node.all_input_nodes if i in envs[0] and i not in alike]
        for source in read:
            self._join(source, one, envs)
        whole = self._copy(node, {source: one.whole[source] for source in read})
        dim = one.expert.row_dims[node]
        by_slice = self._permuted(whole, dim, one.order, one.inverse)
        parts = self._split(by_slice, one.sizes, dim)
        return [emit.call(GRADIENT_BESIDE, a, b) for a, b in zip(made, parts, strict=True)]

    def _join(self, source: fx.Node, one: _Rows, envs: list[dict[fx.Node, Any]]) -> None:
        if source not in one.whole:
            dim = one.expert.row_dims.get(source, 0)
            joined = self._emit.call(torch.cat, [env[source] for env in envs], dim)
            rows = self._emit.call(torch.index_select, joined, dim, one.inverse)
            one.whole[source] = self._emit.method("detach", rows)

    def _permuted(self, rows: fx.Node, dim: int, order: fx.Node, inverse: fx.Node) -> fx.Node:
        """Emit `rows` in another order along `dim`."""
        emit = self._emit
        if not dim:
            return emit.call(PERMUTE_ROWS, rows, order, inverse)
        outermost = emit.method("transpose", rows, 0, dim)
        permuted = emit.call(PERMUTE_ROWS, outermost, order, inverse)
        return emit.method("transpose", permuted, 0, dim)
