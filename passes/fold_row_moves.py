"""Fold gathers of rows into the operator that packs them, permutations into the one that unpacks.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value bit for bit: rows are moved once instead of twice.

    pack(x[i])                    ->  pack(x, i)
    pack(split(x[i][j], n)[c])    ->  pack(x, split(i[j], n)[c]); slices of rows alike
    unpack(m)[p]                  ->  unpack_permute(m, p)
    cat(unpack(a), unpack(b))[p]  ->  unpack_permute(cat(a, b), p); rows of zeros alike

Only rows without other readers are folded, so that no gather runs in vain.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch.fx as fx

from moe_compile.graph.edit import (
    Emitter,
    ValuedEmitter,
    call_otherwise,
    erase_unused,
    read_instead,
)
from moe_compile.graph.query import SIZE, tensor_of
from moe_compile.graph.row_moves import (
    ATEN,
    FULL,
    SLICE,
    SPLIT,
    row_gather,
    rows_joined,
    run_of_rows,
    zero_rows,
)
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.ops.quantized_rows import (
    GATHER_QUANTIZE_PACK,
    UNPACK_DEQUANTIZE,
    UNPACK_DEQUANTIZE_PERMUTE,
)
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass

NO_GATHER: Final = "its rows must come from a gather that nothing else reads"
NO_PERMUTATION: Final = "its rows must be read by one gather of all of them, and by nothing else"


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
            Verdict(candidate=n.name, reason=Reason.NO_ROW_MOVE, detail=detail)
            for nodes, detail in ((packs, NO_GATHER), (unpacks, NO_PERMUTATION))
            for n, found in nodes
            if not found
        )
        origins = _Origins()
        for pack, gathered in packs:
            if gathered:
                source, index = origins.of(pack.args[0])
                call_otherwise(pack, GATHER_QUANTIZE_PACK, source, index)
        for gather in dict.fromkeys(gather for _, gather in unpacks if gather is not None):
            _permute(gather)
        erase_unused(list(dict.fromkeys(sorted(origins.passed))))
        return PassReport(pass_name=self.name, applied=applied, skipped=skipped)


def _gathered(pack: fx.Node) -> bool:
    """Whether the rows that `pack` packs are gathered for it and other packs alone."""
    node = pack.args[0]
    if len(pack.args) > 1 or not isinstance(node, fx.Node) or not _is_read_by_packs(node):
        return False
    if (whole := run_of_rows(node)) is not None:
        return row_gather(whole) is not None and all(_is_packed(part) for part in whole.users)
    return row_gather(node) is not None


def _is_read_by_packs(rows: fx.Node) -> bool:
    return all(user.target is GATHER_QUANTIZE_PACK for user in rows.users)


def _is_packed(part: fx.Node) -> bool:
    """Whether `part` of some rows, or every piece of a split of them, is read by packs alone."""
    if part.target is SPLIT:
        return all(_is_read_by_packs(piece) for piece in part.users)
    return run_of_rows(part) is not None and _is_read_by_packs(part)


@dataclass(slots=True)
class _Origins:
    """Sources of the rows of nodes; one composition serves every chunk."""

    known: dict[fx.Node, tuple[fx.Node, fx.Node | None]] = field(default_factory=dict)
    pieces: dict[fx.Node, fx.Node] = field(default_factory=dict)
    passed: set[fx.Node] = field(default_factory=set)
    """Gathers and splits that may be unused by now."""

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
        if (whole := run_of_rows(node)) is not None:
            source, before = self.of(whole)
            if before is not None:
                return source, self._part(node, before)
        return node, None

    def _part(self, node: fx.Node, index: fx.Node) -> fx.Node:
        self.passed.add(node)
        if node.target is SLICE:
            return ValuedEmitter(node).call(SLICE, index, *node.args[1:])
        split = node.args[0]
        assert isinstance(split, fx.Node)
        self.passed.add(split)
        if split not in self.pieces:
            self.pieces[split] = ValuedEmitter(split).call(SPLIT, index, split.args[1])
        return ValuedEmitter(node).call(operator.getitem, self.pieces[split], node.args[1])


def _permuted(unpack: fx.Node) -> fx.Node | None:
    """Return the gather that alone reads the unpacked rows, by themselves or joined to others."""
    for reader in unpack.users:
        move = row_gather(reader)
        if move is not None and move[0] is unpack and len(unpack.users) == 1:
            return reader
        if parts_of(reader) is not None:
            gathers = [user for user in reader.users if row_gather(user) is not None]
            sizes = [u for u in reader.users if u.target is SIZE and u.args[1] == 0]
            alone = len(gathers) == 1 and len(reader.users) == 1 + len(sizes)
            return gathers[0] if alone else None
    return None


def parts_of(joined: fx.Node) -> list[fx.Node] | None:
    """Return the inputs of `joined`: unpacked rows of one kind, for it alone, and such zeros."""
    parts = rows_joined(joined) or []
    unpacks = [part for part in parts if part.target is UNPACK_DEQUANTIZE]
    zeros = {p: made for p in parts if p not in unpacks and (made := zero_rows(p)) is not None}
    makers = {made[-1] for made in zeros.values()}
    if not unpacks or len(unpacks) + len(zeros) != len(parts):
        return None
    types = {value.dtype for part in parts if (value := tensor_of(part)) is not None}
    alike = len(types) == 1 and all(part.args[1:] == unpacks[0].args[1:] for part in unpacks)
    alone = all(set(part.users) <= {joined, *makers} for part in unpacks)
    return parts if alike and alone else None


def _permute(gather: fx.Node) -> None:
    """Unpack and permute the source of `gather` in one operator."""
    move = row_gather(gather)
    assert move is not None
    rows, index = move
    if rows.target is UNPACK_DEQUANTIZE:
        message, *row = rows.args
        dead = [rows]
    else:
        parts = parts_of(rows)
        assert parts is not None
        unpacks = [part for part in parts if part.target is UNPACK_DEQUANTIZE]
        row = list(unpacks[0].args[1:])
        message = join_messages(rows, parts, unpacks[0].args[0])
        dead = [*unpacks, *(n for p in parts for n in reversed(zero_rows(p) or [])), rows]
    call_otherwise(gather, UNPACK_DEQUANTIZE_PERMUTE, message, index, *row)
    erase_unused(dead)


def join_messages(rows: fx.Node, parts: list[fx.Node], message: Any) -> fx.Node:
    """Emit the messages of all parts, one after the other; a message of zeros is a row of zeros."""
    emit = ValuedEmitter(rows)
    columns = tensor_of(message)
    assert columns is not None
    messages = []
    for part in parts:
        if part.target is UNPACK_DEQUANTIZE:
            messages.append(part.args[0])
        else:
            values = tensor_of(part)
            assert values is not None
            size = [values.shape[0], columns.shape[1]]
            kind = {"dtype": columns.dtype, "device": columns.device, "pin_memory": False}
            zeros = Emitter(rows).call(FULL, size, 0, **kind)  # Inductor lowers no new_zeros
            zeros.meta["val"] = columns.new_zeros(size)
            messages.append(zeros)
    joined = emit.call(ATEN.cat.default, messages)
    for reader in [user for user in rows.users if user.target is SIZE]:
        read_instead(reader, rows, joined)
    return joined
