"""Fold gathers of rows into the operator that packs them, permutations into that which unpacks.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value bit for bit: rows are moved once instead of twice.

    pack(x[i])                    ->  pack(x, i)
    pack(split(x[i][j], n)[c])    ->  pack(x, split(i[j], n)[c])
    unpack(m)[p]                  ->  unpack_permute(m, p)
    cat(unpack(a), unpack(b))[p]  ->  unpack_permute(cat(a, b), p)

Only what nothing else reads is folded, so that no gather runs in vain.
"""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
import torch.fx as fx

from moe_compile.graph.edit import ValuedEmitter, erase_unused
from moe_compile.graph.query import tensor_of
from moe_compile.ops.quantized_rows import (
    GATHER_QUANTIZE_PACK,
    UNPACK_DEQUANTIZE,
    UNPACK_DEQUANTIZE_PERMUTE,
)
from moe_compile.planning.state import CompileState
from passes.contract import Fact, GraphPass, PassReport, Verdict

ATEN: Final = torch.ops.aten
SPLIT: Final = ATEN.split_with_sizes.default
SHAPING: Final = (
    ATEN.expand.default,
    ATEN.view.default,
    ATEN.reshape.default,
    ATEN.unsqueeze.default,
)
"""What turns an index of rows into the index of every column that `gather` takes."""


class Left(enum.Enum):
    """Why a pack or unpack stays as it is."""

    NOT_GATHERED = "no gather of whole rows, read by it alone, makes its rows"
    NOT_PERMUTED = "no gather of whole rows is all that reads its rows"


@dataclass(frozen=True)
class FoldRowMoves(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "fold_row_moves"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Fold around every pack and unpack of the graph."""
        del state
        packs = [(n, _gathered(n)) for n in graph.nodes if n.target is GATHER_QUANTIZE_PACK]
        unpacks = [(n, _permuted(n)) for n in graph.nodes if n.target is UNPACK_DEQUANTIZE]
        applied = tuple(n.name for n, found in (*packs, *unpacks) if found)
        skipped = tuple(
            Verdict(candidate=n.name, reason=reason)
            for nodes, reason in ((packs, Left.NOT_GATHERED), (unpacks, Left.NOT_PERMUTED))
            for n, found in nodes
            if not found
        )
        origins = _Origins()
        for pack, gathered in packs:
            if gathered:
                source, index = origins.of(pack.args[0])
                pack.args = (source, index)
        for gather in dict.fromkeys(gather for _, gather in unpacks if gather is not None):
            _permute(gather)
        erase_unused(list(dict.fromkeys(sorted(origins.passed))))
        return PassReport(pass_name=self.name, applied=applied, skipped=skipped)


def _gathered(pack: fx.Node) -> bool:
    """Whether the rows that `pack` packs are gathered for it and other packs alone."""
    node, readers, found = pack.args[0], {pack}, False
    while isinstance(node, fx.Node) and _only_read_by(node, readers) and len(pack.args) == 1:
        if (move := row_gather(node)) is not None:
            found, readers, node = True, {node}, move[0]
        elif (split := _split_of(node)) is not None:
            pieces = set(split.users)
            if not all(_is_packed(piece) for piece in pieces):
                break
            readers, node = {split}, split.args[0]
        else:
            break
    return found


def _only_read_by(node: fx.Node, readers: set[fx.Node]) -> bool:
    return set(node.users) <= readers


def _is_packed(piece: fx.Node) -> bool:
    return piece.target is operator.getitem and all(
        user.target is GATHER_QUANTIZE_PACK for user in piece.users
    )


def _split_of(node: fx.Node) -> fx.Node | None:
    """Return the split along rows that `node` is a piece of."""
    if node.target is not operator.getitem:
        return None
    split = node.args[0]
    assert isinstance(split, fx.Node)
    along_rows = (split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)) == 0
    return split if split.target is SPLIT and along_rows else None


def row_gather(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return (source, index) when `node` is `source[index]`, whole rows by an index of integers."""
    if node.target is ATEN.index.Tensor:
        source, indices = node.args
        index = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
    elif node.target is ATEN.index_select.default and node.args[1] == 0:
        source, index = node.args[0], node.args[2]
    elif node.target is ATEN.gather.default and node.args[1] == 0:
        source, index = node.args[0], _row_of_index(node.args[2])
    else:
        return None
    if not isinstance(index, fx.Node) or not isinstance(source, fx.Node):
        return None
    rows, positions = tensor_of(source), tensor_of(index)
    if rows is None or positions is None or rows.dim() != 2 or positions.dim() != 1:
        return None
    is_integer = positions.dtype in (torch.int64, torch.int32)
    return (source, index) if is_integer else None


def _row_of_index(index: Any) -> Any:
    """Return the `[R]` index behind one that names the same row for every column, or None."""
    width = tensor_of(index)
    expanded = isinstance(index, fx.Node) and index.target is ATEN.expand.default
    if not expanded or width is None or width.stride(1) != 0:
        return None
    node = index
    while isinstance(node, fx.Node) and node.target in SHAPING:
        node = node.args[0]
    rows = tensor_of(node)
    return node if rows is not None and rows.dim() == 1 and len(rows) == len(width) else None


@dataclass(slots=True)
class _Origins:
    """Where the rows of nodes come from; one composition serves every chunk."""

    known: dict[fx.Node, tuple[fx.Node, fx.Node | None]] = field(default_factory=dict)
    pieces: dict[fx.Node, fx.Node] = field(default_factory=dict)
    passed: set[fx.Node] = field(default_factory=set)
    """Gathers and splits nothing may need any more."""

    def of(self, node: Any) -> tuple[fx.Node, fx.Node | None]:
        """Return (source, index) with `node` equal to `source[index]`, or (node, None)."""
        if node not in self.known:
            self.known[node] = self._find(node)
        return self.known[node]

    def _find(self, node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        if (move := row_gather(node)) is not None:
            source, before = self.of(move[0])
            index = move[1]
            if before is not None:
                index = ValuedEmitter(node).call(ATEN.index.Tensor, before, [index])
            self.passed.add(node)
            return source, index
        if (split := _split_of(node)) is not None:
            source, before = self.of(split.args[0])
            if before is not None:
                self.passed |= {node, split}
                return source, self._piece(split, before, node)
        return node, None

    def _piece(self, split: fx.Node, index: fx.Node, node: fx.Node) -> fx.Node:
        if split not in self.pieces:
            emit = ValuedEmitter(split)
            self.pieces[split] = emit.call(SPLIT, index, split.args[1])
        return ValuedEmitter(node).call(operator.getitem, self.pieces[split], node.args[1])


def _permuted(unpack: fx.Node) -> fx.Node | None:
    """Return the gather that is all that reads the unpacked rows, alone or joined with others."""
    if len(unpack.users) != 1:
        return None
    (reader,) = unpack.users
    rows = unpack
    if _joins(reader, unpack.args[1:]) and len(reader.users) == 1:
        rows, (reader,) = reader, reader.users
    move = row_gather(reader)
    return reader if move is not None and move[0] is rows else None


def _joins(node: fx.Node, row: tuple[Any, ...]) -> bool:
    """Whether `node` joins nothing but unpacked rows of one width and type that it alone reads."""
    along_rows = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) == 0
    return (
        node.target is ATEN.cat.default
        and along_rows
        and len(set(node.args[0])) == len(node.args[0])
        and all(
            part.target is UNPACK_DEQUANTIZE and part.args[1:] == row and len(part.users) == 1
            for part in node.args[0]
        )
    )


def _permute(gather: fx.Node) -> None:
    """Unpack and permute in one, what `gather` gathers from."""
    move = row_gather(gather)
    assert move is not None
    rows, index = move
    parts = [rows] if rows.target is UNPACK_DEQUANTIZE else list(rows.args[0])
    message, *row = parts[0].args
    if rows not in parts:
        messages = [part.args[0] for part in parts]
        message = ValuedEmitter(rows).call(ATEN.cat.default, messages)
    gather.target = UNPACK_DEQUANTIZE_PERMUTE
    gather.args, gather.kwargs = (message, index, *row), {}
    erase_unused(list(dict.fromkeys([*parts, rows])))
