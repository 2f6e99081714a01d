"""Give products in eight bits what arrives in eight bits, and keep nothing longer for them.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value bit for bit: rows and weights that were unpacked to bfloat16 are quantised
              to the bytes that they had. Rounded to bfloat16 a number is off by 2^-8 of itself, and
              e4m3 rounds what is off by less than 2^-5 back; the largest of a block is exact.

    quantize_rows(unpack(m))                  ->  message_rows(m)
    quantize_rows(unpack(m)[p])               ->  message_rows(m, p); slices of rows alike
    quantize_rows(unpack(m)[i][p])            ->  message_rows(m, i[p])
    quantize_rows(cat(unpack(m), zeros)[p])   ->  message_rows(m, p), beyond m rows of zeros
    quantize_rows(cat(unpack(m)[i], zeros))   ->  message_rows(m, cat(i, beyond m))
    quantize_rows(cat(unpack(a), unpack(b)))  ->  message_rows(cat(a, b)), and rows of zeros alike

    quantize_weight(dequantize_weight(p, s))              ->  p, s
    quantize_weight(some experts of the same)             ->  these experts of p and s
    quantize_weight(transpose(dequantize_weight(p, s)))   ->  p and s, transposed in memory

A message has the scales of recipe "blockwise" with e4m3; products of another format are left. Where
only the backward pass reads the rows it unpacks the message, which is kept in place of the rows.
Weights, and rows along rows, that the backward pass quantises are not quantised before it. A block
of 128 x 128 numbers is one of the transposed weight too, so one payload serves both directions.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from moe_compile.graph.edit import (
    Emitter,
    ValuedEmitter,
    call_otherwise,
    erase_unused,
    read_instead,
    replace_uses,
)
from moe_compile.graph.precedence import is_view
from moe_compile.graph.query import SIZE, is_of_backward, tensor_of
from moe_compile.graph.row_moves import (
    ATEN,
    FULL,
    SLICE,
    pads_rows,
    row_gather,
    rows_joined,
    run_of_rows,
    start_of_run,
    zero_rows,
)
from moe_compile.journal.entries import PassReport
from moe_compile.ops.quantized_rows import UNPACK_DEQUANTIZE, UNPACK_DEQUANTIZE_PERMUTE
from moe_compile.ops.scaled_products import (
    DEQUANTIZE_WEIGHT,
    MESSAGE_ROWS,
    QUANTIZE_ROWS,
    QUANTIZE_WEIGHT,
)
from moe_compile.ops.weight_gradients import QUANTIZE_COLUMNS
from moe_compile.plan.state import CompileState
from moe_compile.regions.grouped_products import takes_messages
from moe_compile.regions.row_chain import shape_of
from passes.contract import Fact, GraphPass
from passes.fold_row_moves import join_messages, parts_of

UNPACKS: Final = (UNPACK_DEQUANTIZE, UNPACK_DEQUANTIZE_PERMUTE)
SAME: Final = (ATEN.clone.default, ATEN.expand.default)
"""Operators whose result is what they are given, where its size is."""
BEYOND: Final = torch.iinfo(torch.int32).max
"""An index that no message reaches: of a row of zeros."""
TURN: Final = ATEN.permute.default
LAID_OUT: Final = (
    *SAME,
    ATEN._to_copy.default,
    ATEN.alias.default,
    ATEN.view.default,
    torch.ops.prims.convert_element_type.default,
)
"""The same of weights, which may change their type and layout."""
WIDE: Final = (torch.bfloat16, torch.float32)
"""Types with the exponents of bfloat16, and as many bits or more."""


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
        weights = [node for node in graph.find_nodes(op="call_function", target=QUANTIZE_WEIGHT)]
        weights = [node for node in weights if _hand_over_weight(node)]
        for node in graph.find_nodes(op="call_function", target=DEQUANTIZE_WEIGHT):
            _compute_again(_with_views(node))
        for target in (QUANTIZE_WEIGHT, QUANTIZE_COLUMNS):
            for node in graph.find_nodes(op="call_function", target=target):
                if is_of_backward(node):
                    parts = (view for one in node.users for view in filter(is_view, one.users))
                    _compute_again([node, *node.users, *parts])
        return PassReport(
            pass_name=self.name, applied=tuple(node.name for node in (*fed, *weights))
        )


def _moves_of(quantised: fx.Node) -> list[fx.Node]:
    """Return the nodes that moved the rows that are quantised since they arrived; [] for others."""
    if not takes_messages(quantised):
        return []
    moves: list[fx.Node] = [quantised.args[0]]
    while (source := _moved_from(moves[-1])) is not None:
        moves.append(source)
    parts = parts_of(moves[-1]) or []
    if not parts and moves[-1].target not in UNPACKS:
        return []
    joined = [part for move in moves for part in rows_joined(move) or []]
    zeros = [node for part in joined for node in zero_rows(part) or []]
    return [*dict.fromkeys([*moves, *parts, *zeros])]


def _moved_from(rows: fx.Node) -> fx.Node | None:
    """Return the rows of which `rows` are some, in an order of their own, or None."""
    if (gather := row_gather(rows)) is not None:
        return gather[0]
    if rows.target is SLICE:
        return run_of_rows(rows)
    if (same := _same_rows(rows)) is not None:
        return same
    return _permuted_before_zeros(rows)


def _same_rows(rows: fx.Node) -> fx.Node | None:
    source: Any = rows.args[0] if rows.target in SAME else None
    return source if source is not None and shape_of(source) == shape_of(rows) else None


def _permuted_before_zeros(rows: fx.Node) -> fx.Node | None:
    """Return the first part of `rows`, unpacked in an order, where the others are rows of zeros."""
    first, *others = rows_joined(rows) or [None]
    if first is None or not pads_rows(rows) or zero_rows(first) is not None:
        return None
    types = {value.dtype for part in (first, *others) if (value := tensor_of(part)) is not None}
    unpacked: fx.Node = first
    while (source := _same_rows(unpacked)) is not None:
        unpacked = source
    return first if unpacked.target is UNPACK_DEQUANTIZE_PERMUTE and len(types) == 1 else None


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
        if before is None and rows.target is SLICE:
            return emit.call(SLICE, message, *rows.args[1:]), None, width
        return message, _index_of(emit, rows, before), width


def _index_of(emit: ValuedEmitter, rows: fx.Node, before: fx.Node | None) -> fx.Node | None:
    """Return the index of `rows` in a message, where that of what they are moved from is `before`.

    None is that of all rows as they came.
    """
    if (gather := row_gather(rows)) is not None:
        return gather[1] if before is None else emit.call(ATEN.index.Tensor, before, [gather[1]])
    if before is None:
        return None
    if rows.target is SLICE:
        return emit.call(SLICE, before, *rows.args[1:])
    return _and_beyond(emit, rows, before) if rows_joined(rows) is not None else before


def _before_zeros(rows: fx.Node) -> fx.Node | None:
    """Return the one unpacked message behind which rows of zeros are joined to make `rows`."""
    parts = parts_of(rows) or []
    unpacks = [part for part in parts if part.target is UNPACK_DEQUANTIZE]
    return parts[0] if parts and parts[:1] == unpacks else None


def _size_behind(rows: fx.Node, message: Any) -> fx.Node:
    """Return the number of `rows`, of a message and of zeros; nobody asks them for it any more."""
    emit = ValuedEmitter(rows)
    size = emit.call(operator.add, emit.call(SIZE, message, 0), _num_zeros(rows))
    asking = [user for user in rows.users if user.target is SIZE and user.args[1] == 0]
    replace_uses(dict.fromkeys(asking, size))
    erase_unused(asking)
    return size


def _num_zeros(rows: fx.Node) -> int:
    """Return the number of rows of zeros behind the first part of `rows`."""
    zeros = (tensor_of(part) for part in (rows_joined(rows) or [])[1:])
    return sum(int(part.shape[0]) for part in zeros if part is not None)


def _and_beyond(emit: ValuedEmitter, rows: fx.Node, index: fx.Node) -> fx.Node:
    """Return the index of `rows` in a message: `index`, and behind it rows of zeros."""
    kind, size = index.meta["val"], [_num_zeros(rows)]
    made_as = {"dtype": kind.dtype, "device": kind.device, "pin_memory": False}
    beyond = Emitter(rows).call(FULL, size, BEYOND, **made_as)
    beyond.meta["val"] = kind.new_full(size, BEYOND)
    joined = emit.call(ATEN.cat.default, [index, beyond])
    for reader in [user for user in rows.users if user.target is SIZE and user.args[1] == 0]:
        read_instead(reader, rows, joined)
    return joined


def _from_start(emit: ValuedEmitter, index: fx.Node, size: fx.Node) -> fx.Node:
    """Return an index of so many rows that counts from their start alone.

    Of the message, which is shorter, an index behind its end is one of a row of zeros.
    """
    from_end = emit.call(ATEN.add.Tensor, index, size)
    return emit.call(ATEN.where.self, emit.call(ATEN.lt.Scalar, index, 0), from_end, index)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gathered:
    """Experts of a weight that came in eight bits."""

    unpacked: fx.Node
    """The node that unpacks the whole weight."""
    first: int
    """Number of the first of these experts."""
    is_turned: bool
    """Whether columns of the one are rows of the other."""
    moves: tuple[fx.Node, ...]
    """Nodes between the two, the last first."""


def _gathered(quantised: fx.Node) -> _Gathered | None:
    """Return the weight in eight bits that is unpacked and quantised again; None for others."""
    node: Any = quantised.args[0]
    weight, first, is_turned, moves = tensor_of(node), 0, False, list[fx.Node]()
    if weight is None or weight.dtype is not torch.bfloat16:
        return None
    while node.target is not DEQUANTIZE_WEIGHT:
        moves.append(node)
        if _turns(node):
            is_turned, node = not is_turned, node.args[0]
        elif (start := start_of_run(node)) is not None:
            moves += [node.args[0]] if node.target is operator.getitem else []
            first, node = first + start, run_of_rows(node)
        elif node.target in LAID_OUT and _keeps_numbers(node):
            node = node.args[0]
        else:
            return None
    _, _, recipe, dtype = node.args
    if (recipe, quantised.args[1]) != ("blockwise", "blockwise") or dtype not in WIDE:
        return None
    return _Gathered(unpacked=node, first=first, is_turned=is_turned, moves=tuple(moves))


def _keeps_numbers(node: fx.Node) -> bool:
    """Whether the node has the shape of its input, and no fewer bits than bfloat16."""
    made = tensor_of(node)
    is_wide = made is not None and made.dtype in WIDE
    return is_wide and shape_of(node) == shape_of(node.args[0])


def _turns(node: fx.Node) -> bool:
    """Whether the node transposes the matrix of each expert."""
    if node.target is ATEN.transpose.int:
        return {dim % 3 for dim in node.args[1:]} == {1, 2}
    return node.target is TURN and [dim % 3 for dim in node.args[1]] == [0, 2, 1]


def _hand_over_weight(quantised: fx.Node) -> bool:
    """Have readers of a weight that came in eight bits read it as it came; whether it did."""
    if (found := _gathered(quantised)) is None:
        return False
    emit, (made, _) = ValuedEmitter(quantised), quantised.meta["val"]
    parts: list[Any] = [*found.unpacked.args[:2]]
    if made.shape[0] != parts[0].meta["val"].shape[0]:
        end = found.first + made.shape[0]
        parts = [emit.call(SLICE, part, 0, found.first, end) for part in parts]
    if found.is_turned:
        (payload, scales), whole = parts, {"memory_format": torch.contiguous_format}
        written = emit.call(ATEN.clone.default, payload, **whole)  # column after column, turned
        turned = emit.call(TURN, scales, [0, 2, 1])
        parts = [
            emit.call(TURN, written, [0, 2, 1]),
            emit.call(ATEN.clone.default, turned, **whole),
        ]
        _compute_again([written, turned, *parts])
    picked = [*quantised.users]
    replace_uses({node: parts[int(node.args[1])] for node in picked})
    erase_unused([found.unpacked, *reversed(found.moves), quantised, *picked])
    return True


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


def _with_views(node: fx.Node) -> list[fx.Node]:
    """Return `node`, and all that looks at its result."""
    found = [node]
    for one in found:
        looks = (user for user in one.users if is_view(user) or user.target is operator.getitem)
        found += [user for user in looks if user not in found]
    return found


def _compute_again(nodes: Iterable[fx.Node]) -> None:
    """Have the backward pass compute nodes that have no policy of their own."""
    for node in nodes:
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
