"""One replay of a region's body: the copy of each node, and its host reads in one bulk read.

Contract
    Integers for the host are asked for, not read: one bulk read serves every replay.
    Rows changed elsewhere, by casts, factors and weights of sums, are changed by the model's own
    operators, or ones equal to them element by element: values and gradients of the rows are those
    that the model computes for the same rows at home.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F

from moe_compile.graph.edit import Emitter, recompute_between
from moe_compile.graph.torch_calls import torch_name
from moe_compile.regions.body_nodes import is_move_to_host
from moe_compile.regions.new_order import Part
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.row_chain import CASTS
from moe_compile.regions.token_regions import TokenSum
from moe_compile.regions.token_sums import WEIGHS
from passes.replay.host_reads import BulkRead, Size, name_inferred_size
from passes.replay.prune import Pruned


@dataclass(slots=True)
class Replay:
    """One chunk: the copy in it of each node of the region."""

    experts: range
    env: dict[fx.Node, Any]
    """Node of the region -> its copy for this chunk, or a number; inputs of the region included."""
    pruned: Pruned = field(default_factory=Pruned)


def needed_for(reads: Iterable[fx.Node], region: MoERegion) -> set[fx.Node]:
    """Return the nodes of the region that these host reads depend on, and the reads."""
    given = {*region.inputs, *region.others}
    return region.facts.dependence.above(reads, stops=given) & set(region.count_side)


def emit_until_reads(
    emit: Emitter,
    region: MoERegion,
    replay: Replay,
    reads: BulkRead,
    part: Mapping[fx.Node, Part],
    wanted: set[fx.Node],
) -> None:
    """Emit the nodes of `wanted` that stand before the one read; ask for the integers read."""
    for node in region.count_side:
        if node not in wanted or node in replay.env or node in replay.pruned.nodes:
            continue
        if part[node] not in (Part.BEFORE_THE_READ, Part.THE_READ):
            continue
        source = node.args[0] if node.args else None
        if part[node] is Part.THE_READ:
            assert isinstance(source, fx.Node)
            reads.ask(replay, node, replay.env.get(source, source))
        elif is_move_to_host(node):
            assert isinstance(source, fx.Node)
            replay.env[node] = replay.env.get(source, source)
        else:
            replay.env[node] = _copy_for_chunk(emit, node, replay.env)


def emit_rest(emit: Emitter, nodes: Iterable[fx.Node], replay: Replay) -> None:
    """Emit the nodes this chunk does not have yet, without the pruned ones."""
    for node in nodes:
        if node in replay.env or node in replay.pruned.nodes:
            continue
        env = {**replay.env, **replay.pruned.inputs.get(node, {})}
        if left_out := replay.pruned.without_rows.get(node):
            replay.env[node] = _copy_without_rows(emit, node, env, *left_out)
            continue
        copied = _copy_for_chunk(emit, node, env)
        if dropped := replay.pruned.dropped_from.get(node):
            pieces = [env.get(a, a) for a in node.args[0] if a not in dropped]
            copied.args = (pieces, *copied.args[1:])
        replay.env[node] = copied


def _copy_without_rows(
    emit: Emitter, node: fx.Node, env: dict[fx.Node, Any], before: Size, behind: Size
) -> fx.Node:
    """Emit `node` on its rows except the first and last ones; put zeros in their places."""
    rows = node.args[0]
    assert isinstance(rows, fx.Node)
    if isinstance(before, int) and isinstance(behind, int):
        # torch 2.11's Inductor fails at an open end if the length is known at run time alone
        end = -behind if behind else emit.method("size", env[rows], 0)
        inner = emit.call(operator.getitem, env[rows], slice(before, end))
        copied = _copy_for_chunk(emit, node, {**env, rows: inner})
        padded = emit.call(F.pad, copied, (0, 0, before, behind))
    else:  # Inductor lowers no padding, and no slice from the end, by a size of run time
        left = emit.call(torch.sym_sum, [before, behind])
        own = emit.call(operator.sub, emit.method("size", env[rows], 0), left)
        pieces = emit.call(torch.split, env[rows], [before, own, behind])
        inner = emit.call(operator.getitem, pieces, 1)
        copied = _copy_for_chunk(emit, node, {**env, rows: inner})
        width = emit.method("size", copied, 1)
        ends = [emit.method("new_zeros", copied, size, width) for size in (before, behind)]
        padded = emit.call(torch.cat, [ends[0], copied, ends[1]])
    recompute_between(copied, [padded])
    return padded


def _copy_for_chunk(emit: Emitter, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
    """Emit `node` again for a chunk, which may be without rows, reading its inputs in `env`."""
    copied = emit.copy(node, env)
    name_inferred_size(copied, node)
    return copied


def changed_rows(
    emit: Emitter,
    first: fx.Node,
    rows: fx.Node,
    chain: Iterable[fx.Node],
    factors: Mapping[fx.Node, fx.Node],
) -> fx.Node:
    """Emit `chain` on `rows`, in the place of `first` and with `factors` for the model's."""
    env: dict[fx.Node, Any] = {**factors, first: rows}
    for node in chain:
        rows = env[node] = emit.copy(node, env)
    return rows


def weights_of_rows(emit: Emitter, sums: TokenSum) -> fx.Node:
    """Emit the weights of a weighted sum, which are stored by token, for each row: `[R, 1]`."""
    assert sums.weights is not None
    flat = emit.method("reshape", sums.weights, -1)
    return emit.method("unsqueeze", emit.call(operator.getitem, flat, sums.index), -1)


def weighted_rows(
    emit: Emitter, sums: TokenSum, rows: fx.Node, factors: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """Emit the terms of a sum per token, each row times its weight, in the model's types.

    A batched product with weights `[T, 1, k]` gives a row the gradient `weight * gradient`: one
    product each, as an elementwise one with weights `[T, k, 1]`.
    """
    if sums.weights is None:
        return rows
    for node in sums.tail:
        if torch_name(node) in WEIGHS:
            rows = emit.call(torch.mul, rows, factors[sums.weights])
        elif node.op == "call_method" and node.target in CASTS:
            rows = emit.copy(node, {node.args[0]: rows})
    return rows
