"""Prove that each row an expert adds is made of the row it picked, and of its own factors.

Contract
    The body runs once on fake tensors, and each of its operators is judged by the rules of rows
    (proof/row_rules.py) as if a single expert had received what is picked. These hold for rows in
    any number but for products, which may round a row by how many there are: chunks of tokens are
    not said to have the bits of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.attention.head_proof import Refuse
from moe_compile.capacity.fake_run import FakeRun
from moe_compile.graph.modes import modes
from moe_compile.graph.observation import alike, fake_mode_of, running_on
from moe_compile.graph.query import argument_of, called_name, tensor_of, value_of
from moe_compile.journal.reasons import Reason
from moe_compile.picking.row_index import num_rows_of
from moe_compile.proof.operator_call import Call, Knowledge
from moe_compile.proof.position_rounding import check_product_rounding, sums_by_place
from moe_compile.proof.row_rules import apply
from moe_compile.proof.row_sizes import checked
from moe_compile.proof.row_trace import UNTRACEABLE
from moe_compile.regions.count_facts import CountFacts
from moe_compile.regions.row_domain import Outside, Rows, Unproven, Value


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsOfExpert:
    """Of one expert: what its proof reads."""

    picks: Mapping[fx.Node, int]
    """What takes rows of the tokens -> in which dimension they are then."""
    by_row: tuple[fx.Node, ...]
    offsets: tuple[fx.Node, ...]
    weights: tuple[fx.Node, ...]
    body: tuple[fx.Node, ...]
    result: fx.Node


def offsets_of(node: fx.Node) -> fx.Node | None:
    """Return what says where the groups of a grouped product end; None for any other node."""
    is_grouped = called_name(node) in ("_grouped_mm", "grouped_mm")
    offsets = argument_of(node, 2, "offs") if is_grouped else None
    return offsets if isinstance(offsets, fx.Node) else None


def prove_rows(rows: RowsOfExpert, anchor: fx.Node) -> dict[fx.Node, int]:
    """Return the dimension of rows of each tensor of the body.

    Raises Refuse unless each row of the result is made of its own row alone.
    """
    node = rows.body[0]
    try:
        proof = _Proof(rows, anchor)
        for node in rows.body:
            proof.follow(node)
        dims = proof.row_dims()
        for node in rows.body:
            _check_weights(node, rows, dims)
        node = rows.result
        proof.check_result(node)
        return dims
    except Unproven as unproven:
        detail = f"{node.name}: {unproven.detail}" if unproven.detail else node.name
        raise Refuse(unproven.reason, detail) from unproven
    except (*UNTRACEABLE, NotImplementedError) as error:
        detail = f"{node.name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise Refuse(Reason.UNKNOWN_OPERATOR, detail) from error


class _Proof:
    """The proof of one expert, node by node."""

    def __init__(self, rows: RowsOfExpert, anchor: fx.Node) -> None:
        fake = fake_mode_of([value_of(node) for node in rows.body])
        if fake is None:
            raise Unproven(Reason.UNKNOWN_OPERATOR, "tensors of another kind")
        self._rows, self._fake = rows, fake
        self._run = FakeRun(fake, modes(anchor.graph), anchor)
        self._env: dict[fx.Node, Any] = {}
        pick, dim = next(iter(rows.picks.items()))
        num_rows, own = value_of(pick).shape[dim], num_rows_of(pick, dim)
        self._facts = CountFacts(1, 1, 1)
        sizes = [s for n in _sources(rows) if (t := tensor_of(n)) is not None for s in t.shape]
        self._facts.set_outside(
            [s for s in sizes if isinstance(s, torch.SymInt) and s.node.expr != own]
        )
        self._facts.read_on_host(num_rows, self._facts.received[0])
        self._facts.set_root([num_rows], [0])
        self._known = Knowledge(self._facts)
        for source in dict.fromkeys(_sources(rows)):
            self._give(source)

    def _give(self, source: fx.Node) -> None:
        value = value_of(source)
        if not isinstance(value, torch.Tensor):
            return
        with running_on(self._fake):
            self._env[source] = alike(value)
        dims = {**dict.fromkeys(self._rows.by_row, 0), **self._rows.picks}
        given = Outside(frozenset({source}), is_given=True)
        is_row = source in dims
        value = Rows(dims[source], self._facts.root) if is_row else given
        self._known.set(self._env[source], value)

    def follow(self, node: fx.Node) -> None:
        """Note what `node` makes; raise Unproven where the proof ends."""
        if node in self._rows.picks:
            return
        made = self._env[node] = self._run.copy(node, self._env)
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(made)):
            raise Unproven(Reason.SIZE_FROM_COUNTS)
        if _types(made) != _types(value_of(node)):
            raise Unproven(Reason.UNKNOWN_OPERATOR, "traced with other types")
        for call in self._run.operators.get(node, []):
            self._known.moment += 1
            call = replace(call, known=self._known)
            if torch.Tag.nondeterministic_seeded in call.func.tags:
                raise Unproven(Reason.RANDOM, str(call.func))
            if call.func._schema.is_mutable:
                raise Unproven(Reason.UNKNOWN_OPERATOR, str(call.func))
            found = self._grouped(call) if offsets_of(node) is not None else apply(call)
            each = found if isinstance(found, list) else [found] * len(call.outputs)
            for tensor, value in zip(call.outputs, each, strict=True):
                self._set(tensor, value)

    def _grouped(self, call: Call) -> Value:
        """Return the rows of a product of which slices are given their own ends of groups."""
        if call.name != "_grouped_mm":
            return apply(call)  # type: ignore[return-value]
        left, right = (call.argument(name) for name in ("self", "mat2"))
        offsets = offsets_of(call.node)
        is_given = offsets in self._rows.offsets and call.argument("offs") is self._env[offsets]
        plain = call.argument("bias") is None and call.argument("out_dtype") is None
        rows = call.value(left)
        if not (is_given and plain and rows == Rows(0, self._facts.root) and right.dim() == 3):
            raise Unproven(Reason.UNKNOWN_OPERATOR, "_grouped_mm of another form")
        if not isinstance(call.value(right), Outside):
            raise Unproven(Reason.ROWS_MIXED, "_grouped_mm of rows by rows")
        check_product_rounding(call, left, 0)
        return rows

    def _set(self, tensor: torch.Tensor, value: Value) -> None:
        value = checked(self._facts, tensor, value)
        if isinstance(value, Rows):
            outer = any(size != 1 for size in tensor.shape[: value.dim])
            if outer and sums_by_place(tensor):
                detail = f"rows are not the outermost dimension of shape {list(tensor.shape)}"
                raise Unproven(Reason.ROUNDED_BY_POSITION, detail)
        self._known.set(tensor, value)

    def check_result(self, result: fx.Node) -> None:
        """Raise Unproven unless the result has the rows as they were picked."""
        if self._known.value(self._env[result]) != Rows(0, self._facts.root):
            raise Unproven(Reason.ROWS_OUT_OF_ORDER)

    def row_dims(self) -> dict[fx.Node, int]:
        """Return the dimension of rows of each tensor of the body that has one."""
        found = {}
        for node in self._rows.body:
            made = self._env[node]
            value = self._known.value(made) if isinstance(made, torch.Tensor) else None
            if isinstance(value, Rows):
                found[node] = value.dim
        return found


def _check_weights(node: fx.Node, rows: RowsOfExpert, dims: Mapping[fx.Node, int]) -> None:
    """Raise Unproven unless what reads a weight makes rows of rows: it runs on all of them."""
    if not any(source in rows.weights for source in node.all_input_nodes):
        return
    inside = [source for source in (node, *node.all_input_nodes) if source in rows.body]
    if any(source not in dims for source in inside):
        raise Unproven(Reason.UNKNOWN_OPERATOR, "a parameter meets what is no row")


def _sources(rows: RowsOfExpert) -> Iterable[fx.Node]:
    """Yield what the body begins with: the rows picked, and all it reads from outside."""
    yield from rows.picks
    for node in rows.body:
        if node not in rows.picks:
            yield from (i for i in node.all_input_nodes if i not in rows.body)


def _types(value: Any) -> list[torch.dtype]:
    return [t.dtype for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
