"""Have readers of a piece of joined parts read the part, so that they need wait for no other.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value bit for bit, and its memory layout: a piece is replaced by a part only
              where it has exactly its elements, one after another.

    split(view(cat([a, b]), ...), ...)[i]  ->  view of a, or of b; slices alike

Blocks under activation checkpointing are split into parts each by itself: one block joins parts and
the next splits them again, forward and, of gradients, backward. Without this pass no part of a
block could begin before all parts of the one before were done.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
import torch.fx as fx

from moe_compile.graph.edit import call_otherwise, erase_unused
from moe_compile.graph.query import number_of, tensor_of
from moe_compile.graph.row_moves import SLICE, SPLIT
from moe_compile.journal.entries import PassReport
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass

ATEN: Final = torch.ops.aten
VIEWS: Final = (ATEN.view.default, ATEN.reshape.default, ATEN._unsafe_view.default)


@dataclass(frozen=True)
class ForwardCatSplit(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "forward_cat_split"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    after: ClassVar[frozenset[str]] = frozenset({"sort_nodes"})
    commutes_with: ClassVar[frozenset[str]] = frozenset({"merge_host_reads"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Read parts in graphs that run in parts of the batch."""
        if not state.is_in_parts:
            return PassReport(pass_name=self.name)
        found = [(node, part) for node in graph.nodes if (part := _part(node)) is not None]
        applied = []
        for node, part in found:
            shape = _shape(node)
            assert shape is not None
            call_otherwise(node, ATEN.view.default, part, shape)
            applied.append(node.name)
        if applied:
            joins = (*VIEWS, ATEN.cat.default, SPLIT)
            erase_unused([n for n in graph.nodes if n.target in joins])
        return PassReport(pass_name=self.name, applied=tuple(applied))


def _part(node: fx.Node) -> fx.Node | None:
    """Return the part of a join that has the elements of `node`, in order; None where none has."""
    piece = _piece(node)
    if piece is None or not _is_plain(node):
        return None
    source, first, last = piece
    source = _viewed(source)
    if source.target is not ATEN.cat.default or not _is_plain(source):
        return None
    parts, dim = source.args[0], source.args[1] if len(source.args) > 1 else 0
    shape = _shape(source)
    if shape is None or math.prod(shape[:dim]) != 1 or dim < 0:
        return None
    at = 0
    for part in parts:
        size = math.prod(_shape(part) or (0,))
        if (at, at + size) == (first, last) and _is_plain(part) and size:
            return _viewed(part) if isinstance(part, fx.Node) else None
        at += size
    return None


def _viewed(node: fx.Node) -> fx.Node:
    """Return the base that views show as a whole; torch keeps bases between checkpointed blocks."""
    while node.target in VIEWS and _is_plain(node) and _is_plain(node.args[0]):
        node = node.args[0]
    return node


def _piece(node: fx.Node) -> tuple[Any, int, int] | None:
    """Return (source, first, end) where `node` is that run of elements of a source."""
    if node.target is operator.getitem and node.args[0].target is SPLIT:
        source, sizes, *rest = node.args[0].args
        dim, before = rest[0] if rest else 0, sizes[: node.args[1]]
    elif node.target is SLICE and len(node.args) == 4:
        source, dim, start = node.args[:3]
        before = [start]
    else:
        return None
    if any(type(n) is not int or n < 0 for n in (dim, *before)):
        return None
    first = sum(before)
    shape, own = _shape(source), _shape(node)
    if shape is None or own is None or math.prod(shape[:dim]) != 1:
        return None
    inner = math.prod(shape[dim + 1 :])
    return source, first * inner, (first + own[dim]) * inner


def _shape(node: Any) -> Sequence[int] | None:
    """Return the sizes of a tensor where all are known."""
    tensor = tensor_of(node) if isinstance(node, fx.Node) else None
    sizes = None if tensor is None else [number_of(size) for size in tensor.shape]
    return None if sizes is None or None in sizes else [size for size in sizes if size is not None]


def _is_plain(node: Any) -> bool:
    """Whether the elements of a tensor of known sizes lie one after another."""
    tensor = tensor_of(node) if _shape(node) is not None else None
    return tensor is not None and tensor.is_contiguous()
