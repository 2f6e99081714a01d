"""Give products in eight bits the rows that arrive in eight bits, and keep nothing longer for them.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value bit for bit: rows that were unpacked to bfloat16 are quantised to the
              bytes that they had. Rounded to bfloat16 a number is off by 2^-8 of itself, and e4m3
              rounds what is off by less than 2^-5 back; the largest of a block is exact.

    quantize_rows(unpack(m))                  ->  message_rows(m)
    quantize_rows(unpack(m)[p])               ->  message_rows(m, p); slices of rows alike
    quantize_rows(unpack(m)[i][p])            ->  message_rows(m, i[p])
    quantize_rows(cat(unpack(m), zeros)[p])   ->  message_rows(m, p), beyond m rows of zeros
    quantize_rows(cat(unpack(a), unpack(b)))  ->  message_rows(cat(a, b)), and rows of zeros alike

A message has the scales of recipe "blockwise" with e4m3; products of another format are left. Where
only the backward pass reads the rows it unpacks the message, which is kept in place of the rows.
Weights, and rows along rows, that the backward pass quantises are not quantised before it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from moe_compile.graph.edit import ValuedEmitter, call_otherwise, erase_unused, replace_uses
from moe_compile.graph.precedence import is_view
from moe_compile.graph.query import is_of_backward, tensor_of
from moe_compile.graph.row_moves import ATEN, SLICE, row_gather, run_of_rows, zero_rows
from moe_compile.journal.entries import PassReport
from moe_compile.ops.quantized_rows import UNPACK_DEQUANTIZE, UNPACK_DEQUANTIZE_PERMUTE
from moe_compile.ops.scaled_products import MESSAGE_ROWS, QUANTIZE_ROWS, QUANTIZE_WEIGHT
from moe_compile.ops.weight_gradients import QUANTIZE_COLUMNS
from moe_compile.plan.state import CompileState
from moe_compile.regions.grouped_products import takes_messages
from moe_compile.regions.row_chain import shape_of
from passes.contract import Fact, GraphPass
from passes.fold_row_moves import SIZE, join_messages, parts_of

UNPACKS: Final = (UNPACK_DEQUANTIZE, UNPACK_DEQUANTIZE_PERMUTE)
SAME: Final = (ATEN.clone.default, ATEN.expand.default)
"""Operators whose result is what they are given, where its size is."""


@dataclass(frozen=True)
class FeedProducts(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "feed_products"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    after: ClassVar[frozenset[str]] = frozenset(
        {"save_overwritten", "whole_weights"}  # a policy is left alone
    )

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Feed all products whose rows are moved, and nothing more, since they arrived."""
        del state
        quantised = graph.find_nodes(op="call_function", target=QUANTIZE_ROWS)
        fed = {node: moves for node in quantised if (moves := _moves_of(node))}
        messages = _Messages()
        for node in fed:
            message, index, width = messages.of(node.args[0])
            call_otherwise(node, MESSAGE_ROWS, message, index, width)
        moved = {move for moves in fed.values() for move in moves}
        in_order = [node for node in graph.nodes if node in moved]
        erase_unused(in_order)
        _unpack_in_backward([node for node in in_order if node.users])
        for target in (QUANTIZE_WEIGHT, QUANTIZE_COLUMNS):
            for node in graph.find_nodes(op="call_function", target=target):
                if is_of_backward(node):
                    parts = (view for one in node.users for view in filter(is_view, one.users))
                    _compute_again([node, *node.users, *parts])
        return PassReport(pass_name=self.name, applied=tuple(node.name for node in fed))


def _moves_of(quantised: fx.Node) -> list[fx.Node]:
    """Return the nodes that moved the rows that are quantised since they arrived; [] for others."""
    if not takes_messages(quantised):
        return []
    moves: list[fx.Node] = [quantised.args[0]]
    while (source := _moved_from(moves[-1])) is not None:
        moves.append(source)
    if moves[-1].target in UNPACKS:
        return moves
    parts = parts_of(moves[-1]) or []
    zeros = [node for part in parts for node in zero_rows(part) or []]
    return [*moves, *parts, *zeros] if parts else []


def _moved_from(rows: fx.Node) -> fx.Node | None:
    """Return the rows of which `rows` are some, in an order of their own, or None."""
    if (gather := row_gather(rows)) is not None:
        return gather[0]
    if rows.target is SLICE:
        return run_of_rows(rows)
    source: Any = rows.args[0] if rows.target in SAME else None
    return source if source is not None and shape_of(source) == shape_of(rows) else None


@dataclass(slots=True)
class _Messages:
    """Messages that hold moved rows; one is made for all products that read the same rows."""

    known: dict[fx.Node, tuple[Any, Any, Any]] = field(default_factory=dict)

    def of(self, rows: Any) -> tuple[Any, Any, Any]:
        """Return the message that holds `rows`, their index in it or None, and their width."""
        if rows not in self.known:
            self.known[rows] = self._find(rows)
        return self.known[rows]

    def _find(self, rows: fx.Node) -> tuple[Any, Any, Any]:
        if rows.target in UNPACKS:
            message, *index, width, _ = rows.args
            return message, next(iter(index), None), width
        if (source := _moved_from(rows)) is None:
            parts = parts_of(rows) or []
            first = next(part for part in parts if part.target is UNPACK_DEQUANTIZE)
            return join_messages(rows, parts, first.args[0]), None, first.args[1]
        gather, emit = row_gather(rows), ValuedEmitter(rows)
        if gather is not None and (unpacked := _before_zeros(source)) is not None:
            message, width, _ = unpacked.args
            return message, _from_start(emit, gather[1], _size_behind(source, message)), width
        message, before, width = self.of(source)
        if gather is not None:
            index = gather[1]
            if before is not None:
                index = emit.call(ATEN.index.Tensor, before, [index])
            return message, index, width
        if rows.target is not SLICE:
            return message, before, width
        if before is None:
            return emit.call(SLICE, message, *rows.args[1:]), None, width
        return message, emit.call(SLICE, before, *rows.args[1:]), width


def _before_zeros(rows: fx.Node) -> fx.Node | None:
    """Return the one unpacked message behind which rows of zeros are joined to make `rows`."""
    parts = parts_of(rows) or []
    unpacks = [part for part in parts if part.target is UNPACK_DEQUANTIZE]
    return parts[0] if parts and parts[:1] == unpacks else None


def _size_behind(rows: fx.Node, message: Any) -> fx.Node:
    """Return the number of `rows`, of a message and of zeros; nobody asks them for it any more."""
    emit = ValuedEmitter(rows)
    others = (tensor_of(part) for part in (parts_of(rows) or [])[1:])
    num_zeros = sum(int(part.shape[0]) for part in others if part is not None)
    size = emit.call(operator.add, emit.call(SIZE, message, 0), num_zeros)
    asking = [user for user in rows.users if user.target is SIZE and user.args[1] == 0]
    replace_uses(dict.fromkeys(asking, size))
    erase_unused(asking)
    return size


def _from_start(emit: ValuedEmitter, index: fx.Node, size: fx.Node) -> fx.Node:
    """Return an index of so many rows that counts from their start alone.

    Of the message, which is shorter, an index behind its end is one of a row of zeros.
    """
    from_end = emit.call(ATEN.add.Tensor, index, size)
    return emit.call(ATEN.where.self, emit.call(ATEN.lt.Scalar, index, 0), from_end, index)


def _unpack_in_backward(moved: list[fx.Node]) -> None:
    """Have the backward pass make those of `moved` rows anew that nothing of the forward reads."""
    kept = set[fx.Node]()
    for node in reversed(moved):
        others = (user for user in node.users if user not in moved)
        is_read = not all(map(is_of_backward, others))
        if is_read or not kept.isdisjoint(node.users):
            kept.add(node)
        elif not is_of_backward(node):
            _compute_again([node, *filter(is_view, node.users)])


def _compute_again(nodes: Iterable[fx.Node]) -> None:
    """Have the backward pass compute nodes that have no policy of their own."""
    for node in nodes:
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
