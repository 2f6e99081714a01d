"""Rules for splits and joins along the rows, and for writes through slices: the order of rows.

Contract
    A rule returns None where an operator works along other dimensions.
    Rows are cut only where the counts say that one run ends and the next begins.
    `WrittenParts` has the contents of a tensor once some rows were written by a view. Slices are
    followed along the dimension that holds rows, or will hold them, if they start and end between
    runs of rows. Any other tensor that shares memory with a write is forgotten, and reading it ends
    the proof.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sympy
import torch
import torch.fx as fx

from moe_compile.graph.memory import storages_of
from moe_compile.graph.query import tensor_of
from moe_compile.journal.reasons import Left, Reason
from moe_compile.proof.operator_call import Call, Knowledge, dim_of
from moe_compile.regions.count_facts import CountFacts
from moe_compile.regions.row_domain import (
    FROM_COUNTS,
    Fixed,
    Order,
    Rows,
    Value,
    cut,
    is_selected,
    join,
    length,
    order_after_write_between,
    order_along,
    padding,
)

Shape = Sequence[sympy.Expr]


def the_rows(call: Call) -> tuple[torch.Tensor, Rows]:
    """Return the first input with its rows."""
    tensor = call.inputs[0]
    rows = call.value(tensor)
    if not isinstance(rows, Rows):
        raise call.unknown()
    return tensor, rows


def _whole_dim(before: Shape, dim: int, after: Shape) -> int | None:
    """Return the dimension of `after` that holds the same as `dim` of `before`; else None."""
    ahead = sympy.Mul(*before[:dim])
    alike = (d for d, size in enumerate(after) if size == before[dim])
    return next((d for d in alike if sympy.Mul(*after[:d]) == ahead), None)


def row_dim_through(
    facts: CountFacts, rows: torch.Tensor, dim: int, other: torch.Tensor
) -> int | None:
    """Return the dimension of `other` that holds the rows that `dim` of `rows` holds.

    None unless both are views of one memory, of all the same elements in the same order.
    """
    shapes = [[facts.formula(size) for size in t.shape] for t in (rows, other)]
    starts = {facts.formula(t.storage_offset()) for t in (rows, other)}
    same = storages_of(rows) == storages_of(other) and len(starts) == 1
    same &= sympy.Mul(*shapes[0]) == sympy.Mul(*shapes[1])
    for tensor, shape in zip((rows, other), shapes, strict=True):
        dense = [sympy.Mul(*shape[d + 1 :]) for d in range(len(shape))]
        strides = map(facts.formula, tensor.stride())
        same &= all(a == b or n == 1 for a, b, n in zip(dense, strides, shape, strict=True))
    return _whole_dim(shapes[0], dim, shapes[1]) if same else None


def squeezed(call: Call) -> None:
    """Refuse to take the rows' dimension away, as would happen where there is one row."""
    tensor, rows = the_rows(call)
    given = call.argument("dim")
    dims = [given] if isinstance(given, int) else list(given or range(tensor.dim()))
    if rows.dim in [dim_of(d, tensor.dim()) for d in dims]:
        raise call.unknown()


def _pieces(call: Call, order: Order, sizes: list[sympy.Expr]) -> list[Order]:
    pieces = cut(order, sizes)
    if pieces is None:
        raise Left(
            Reason.ROWS_MIXED,
            f"{call.name} must cut between experts or ranks, but cuts between rows that "
            "one expert got from one rank",
        )
    return pieces


def _kept(call: Call, order: Order, piece: Order) -> Order:
    """Return `piece` of `order`; parts of rows of an unknown order must be whole experts."""
    for segment in piece:
        is_part = is_selected(segment) and segment not in order
        if is_part and not call.facts.note_experts_of(segment):
            detail = (
                f"{call.name} must cut at the end of an expert's rows, and cuts rows in an "
                "unknown order elsewhere"
            )
            raise Left(Reason.ROWS_MIXED, detail)
    return piece


def sliced(call: Call) -> Value | None:
    """A slice of the rows must start and end where runs of rows do."""
    tensor, rows = the_rows(call)
    if dim_of(call.argument("dim", 0), tensor.dim()) != rows.dim:
        return None
    total = length(rows.order)
    start, end = slice_bounds(call, total)
    if call.facts.formula(call.argument("step", 1)) != 1:
        raise Left(
            Reason.ROWS_MIXED, "a slice must take all rows of a range, and takes only every n-th"
        )
    if start == 0 and end == total:
        return rows
    _, kept, _ = _pieces(call, rows.order, [start, end - start])
    return Rows(rows.dim, _kept(call, rows.order, kept))


def slice_bounds(call: Call, total: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Return where a slice of a dimension of size `total` starts and ends."""
    given = call.argument("start")
    start = sympy.S.Zero if given is None else _position(call, given, total)
    return start, _position(call, call.argument("end"), total)


def _position(call: Call, position: Any, total: sympy.Expr) -> sympy.Expr:
    if position is None or (isinstance(position, int) and position == sys.maxsize):
        return total
    formula = call.facts.formula(position)
    return total + formula if formula.is_Integer and formula < 0 else formula


def split(call: Call) -> list[Value] | None:
    """A split of the rows must fall between runs of rows."""
    tensor, rows = the_rows(call)
    if dim_of(call.argument("dim", 0), tensor.dim()) != rows.dim:
        return None
    sizes = call.argument("split_sizes")
    if sizes is None:
        raise Left(
            Reason.ROWS_MIXED, "rows must be split by counts, and are split into equal parts"
        )
    formulas = [call.facts.formula(size) for size in sizes]
    *pieces, rest = _pieces(call, rows.order, formulas)
    if rest:
        raise Left(Reason.ROWS_MIXED, "a split must have all of the rows, and leaves some out")
    return [Rows(rows.dim, _kept(call, rows.order, piece)) for piece in pieces]


def joined(call: Call) -> Value | None:
    """Rows after rows, with constants as padding; or the same rows side by side."""
    parts = [(t, call.value(t)) for t in call.inputs]
    dims = {v.dim for _, v in parts if isinstance(v, Rows)}
    if len(dims) != 1 or any(isinstance(v, FROM_COUNTS) for _, v in parts):
        raise Left(Reason.VALUE_FROM_COUNTS if len(dims) == 1 else Reason.ROWS_MIXED, "cat")
    (row_dim,) = dims
    if any(not isinstance(v, Rows | Fixed) for _, v in parts):
        raise Left(Reason.ROWS_FROM_OUTSIDE, call.name)
    if dim_of(call.argument("dim", 0), call.outputs[0].dim()) != row_dim:
        return None
    in_graph = (tensor_of(node) for node in call.node.all_input_nodes)
    given = [t for t in in_graph if t is not None]  # autocast gives them one type behind the node
    if all(len({(t.dtype, t.dim()) for t in ts}) == 1 for ts in ([t for t, _ in parts], given)):
        call.known.joins.append(call.node)
    orders = (
        v.order if isinstance(v, Rows) else (padding(call.shape(t)[row_dim]),) for t, v in parts
    )
    return Rows(row_dim, join(orders))


def padded(call: Call) -> Value | None:
    """Constants behind the last row, and around each."""
    tensor, rows = the_rows(call)
    place = 2 * (tensor.dim() - 1 - rows.dim)
    amounts = [call.facts.formula(a) for a in call.argument("pad")][place : place + 2]
    if call.reads_counts() or all(amount == 0 for amount in amounts):
        return None
    ahead, behind = amounts
    if ahead != 0 or not behind.is_nonnegative:  # a negative amount cuts rows off
        raise call.unknown()
    return Rows(rows.dim, join([rows.order, (padding(behind),)]))


class _Part(NamedTuple):
    """`view` is `size` rows of `whole` from `start` on, along `dim`."""

    view: torch.Tensor
    whole: torch.Tensor
    dim: int
    start: sympy.Expr
    size: sympy.Expr


@dataclass(slots=True)
class WrittenParts:
    """The slices of tensors that were taken, and the rows that were written."""

    known: Knowledge
    _parts: dict[int, _Part] = field(default_factory=dict)
    _experts: dict[fx.Node, set[int | None]] = field(default_factory=dict)
    """Node that writes -> experts of the rows; None for rows that are not of one expert."""

    def follow(self, call: Call) -> None:
        """Note the slice that `call` takes; name its size where the tracer gave it a new one."""
        (out,) = call.outputs if len(call.outputs) == 1 else (None,)
        if call.name != "slice" or out is None:
            return
        whole = call.inputs[0]
        dim = dim_of(call.argument("dim", 0), whole.dim())
        total = call.facts.formula(whole.shape[dim])
        order = order_along(call.value(whole), dim, total)
        start, end = slice_bounds(call, total)
        if order is None or cut(order, [start, end - start]) is None:
            return
        self._parts[id(out)] = _Part(out, whole, dim, start, end - start)
        if isinstance(call.value(whole), Fixed) and call.facts.is_unknown(out.shape[dim]):
            call.facts.read_on_host(out.shape[dim], end - start)

    def note_writer(self, call: Call, value: Value | None) -> None:
        """Note the expert of the rows that `call` writes in place: of its source or its result."""
        source = call.argument("source", call.argument("values"))
        rows = call.value(source) if isinstance(source, torch.Tensor) else value
        whose = call.facts.is_rows_of_one(rows.order) if isinstance(rows, Rows) else None
        self._experts.setdefault(call.node, set()).add(whose)

    def for_one(self) -> Iterator[tuple[fx.Node, int]]:
        """Yield the nodes that write rows of one expert, where that has any, and the expert."""
        for node, experts in self._experts.items():
            expert = next(iter(experts))
            if len(experts) == 1 and expert is not None:
                yield node, expert

    def written(
        self, tensors: Iterable[torch.Tensor], call: Call, values: Sequence[Value]
    ) -> Iterator[tuple[torch.Tensor, Value]]:
        """Yield the values of memory that `call` wrote by `tensors`; it returned `values`."""
        returned = {id(t): value for t, value in zip(call.outputs, values, strict=True)}
        given = [*tensors]
        for tensor in given:
            alone = values[0] if len(given) == len(values) == 1 else None
            value = returned.get(id(tensor), alone)
            yield from self._overwrite(tensor, value)
            if value is not None:
                yield tensor, value

    def _overwrite(
        self, tensor: torch.Tensor, value: Value | None
    ) -> list[tuple[torch.Tensor, Value]]:
        """Forget tensors that share memory with `tensor`, which now holds `value`; None: unknown.

        Return the values of the tensors that it is a slice of, and of other views of all of it.
        """
        found: list[tuple[torch.Tensor, Value]] = []
        while value is not None and (part := self._parts.get(id(tensor))) is not None:
            order = self._written(part, value)
            if order is None:
                break
            tensor, value = part.whole, Rows(part.dim, order)
            found.append((tensor, value))
        forgotten = self.known.forget_aliases(tensor)
        if isinstance(value, Rows):
            found += self._views(tensor, value, forgotten)
        return found

    def _views(
        self, written: torch.Tensor, rows: Rows, others: list[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, Value]]:
        """Yield those of `others` that show the rows that were written, with their values."""
        for view in others:
            dim = row_dim_through(self.known.facts, written, rows.dim, view)
            if view is not written and dim is not None:
                yield view, Rows(dim, rows.order)

    def _written(self, part: _Part, value: Value) -> Order | None:
        size = self.known.facts.formula(part.whole.shape[part.dim])
        whole = order_along(self.known.value(part.whole), part.dim, size)
        written = order_along(value, part.dim, part.size)
        if whole is None or written is None:
            return None
        return order_after_write_between(whole, part.start, part.size, written)
