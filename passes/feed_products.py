"""Give products in eight bits the rows that arrive in eight bits, and keep nothing longer for them.

Contract
    Requires  FUNCTIONAL.
    Keeps     collectives, and every value but of rows that arrive in eight bits and feed a product:
              these are not dequantised and quantised once more, which saves one rounding of each.

    quantize_rows(unpack(m))                  ->  message_rows(m)
    quantize_rows(unpack(m)[p])               ->  message_rows(m, p)
    quantize_rows(unpack(m)[i][p])            ->  message_rows(m, i[p])
    quantize_rows(cat(unpack(a), zeros)[p])   ->  message_rows(cat(a, zeros), p)

A message has the scales of recipe "blockwise" with e4m3; products of another format are left. It
does not matter what else reads the rows, so that a function that the backward pass computes again
has the bits that it had. Where only the backward pass reads them it unpacks the message, which is
kept in place of the rows. Weights that the backward pass quantises are not quantised before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from moe_compile.graph.edit import ValuedEmitter, call_otherwise, erase_unused
from moe_compile.graph.precedence import is_view
from moe_compile.graph.query import argument_of, is_of_backward
from moe_compile.graph.row_moves import ATEN, row_gather
from moe_compile.journal.entries import PassReport
from moe_compile.ops.quantized_rows import UNPACK_DEQUANTIZE, UNPACK_DEQUANTIZE_PERMUTE
from moe_compile.ops.scaled_products import MESSAGE_ROWS, QUANTIZE_ROWS, QUANTIZE_WEIGHT
from moe_compile.plan.state import CompileState
from moe_compile.regions.row_chain import shape_of
from passes.contract import Fact, GraphPass
from passes.fold_row_moves import join_messages, parts_of

UNPACKS: Final = (UNPACK_DEQUANTIZE, UNPACK_DEQUANTIZE_PERMUTE)


@dataclass(frozen=True)
class FeedProducts(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "feed_products"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    after: ClassVar[frozenset[str]] = frozenset({"save_overwritten"})  # a policy is left alone

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Feed all products whose rows are moved, and nothing more, since they arrived."""
        del state
        fed: dict[tuple[fx.Node, ...], list[fx.Node]] = {}
        for node in graph.find_nodes(op="call_function", target=QUANTIZE_ROWS):
            if moves := _moves_of(node):
                fed.setdefault(moves, []).append(node)
        for moves, nodes in fed.items():
            message, index, width = _message_of(moves)
            for node in nodes:
                call_otherwise(node, MESSAGE_ROWS, message, index, width)
            if not erase_unused(reversed(moves)):
                _unpack_in_backward(moves)
        for node in graph.find_nodes(op="call_function", target=QUANTIZE_WEIGHT):
            if is_of_backward(node):
                _compute_again([node, *node.users])
        return PassReport(
            pass_name=self.name, applied=tuple(n.name for nodes in fed.values() for n in nodes)
        )


def _moves_of(quantised: fx.Node) -> tuple[fx.Node, ...]:
    """Return the rows that are quantised and the nodes that move them since they arrived.

    In this order, as many as there are: an expansion to their own size, a gather, a concatenation,
    its parts. () for other rows.
    """
    recipe, element = argument_of(quantised, 1, "recipe"), argument_of(quantised, 2, "element")
    first: Any = quantised.args[0]
    if recipe != "blockwise" or element not in (None, "e4m3"):
        return ()
    rows = _unexpanded(first)
    gather = row_gather(rows)
    source = rows if gather is None else gather[0]
    is_message = source.target in UNPACKS
    parts = [] if is_message else parts_of(source)
    return () if parts is None else tuple(dict.fromkeys([first, rows, source, *parts]))


def _unexpanded(rows: fx.Node) -> fx.Node:
    """Return the rows that autograd expands to the size that they have, or `rows`."""
    source: Any = rows.args[0] if rows.target is ATEN.expand.default else rows
    return source if shape_of(source) == shape_of(rows) else rows


def _message_of(moves: tuple[fx.Node, ...]) -> tuple[Any, Any, Any]:
    """Return the message that holds moved rows, their index in it or None, and their width."""
    rows = _unexpanded(moves[0])
    gather = row_gather(rows)
    source, index = (rows, None) if gather is None else gather
    if source.target is UNPACK_DEQUANTIZE_PERMUTE:
        message, before, width = source.args[:3]
        if index is None:
            return message, before, width
        return message, ValuedEmitter(rows).call(ATEN.index.Tensor, before, [index]), width
    first = next(node for node in moves if node.target is UNPACK_DEQUANTIZE)
    message, width = first.args[:2]
    if source.target is not UNPACK_DEQUANTIZE:
        message = join_messages(source, parts_of(source) or [], message)
    return message, index, width


def _unpack_in_backward(moves: tuple[fx.Node, ...]) -> None:
    """Have the backward pass make moved rows anew, where nothing of the forward reads them."""
    readers = dict.fromkeys(user for node in moves for user in node.users if user not in moves)
    if all(map(is_of_backward, readers)):
        _compute_again([*moves, *filter(is_view, readers)])


def _compute_again(nodes: Iterable[fx.Node]) -> None:
    """Have the backward pass compute nodes that have no policy of their own."""
    for node in nodes:
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
