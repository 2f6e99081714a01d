"""Rules for views, splits and joins of rows: the new row dimension and the order of rows.

Contract
    A view keeps the row dimension whole or is refused.
    Rows are cut only where the counts say that one run ends and the next begins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import sympy
import torch

from moe_compile.graph.memory import storages_of
from moe_compile.graph.query import tensor_of
from moe_compile.journal.left import Left
from moe_compile.journal.reasons import Reason
from moe_compile.proof.operator_call import Call, dim_of
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


def reshaped(call: Call) -> Value:
    """Find the dimension that holds the rows whole after a change of shape."""
    tensor, rows = the_rows(call)
    dim = _whole_dim(call.shape(tensor), rows.dim, call.shape(call.outputs[0]))
    if dim is None:
        raise call.unknown()
    return Rows(dim, rows.order)


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


def _transposed(call: Call, dim: int, ndim: int) -> int:
    if call.name == "permute":
        dims = [dim_of(d, ndim) for d in call.argument("dims")]
        return dims.index(dim)
    pair = [dim_of(d, ndim) for d in (call.argument("dim0", 0), call.argument("dim1", 1))]
    if call.name == "t" and ndim < 2:
        return dim
    return pair[1 - pair.index(dim)] if dim in pair else dim


def _unsqueezed(call: Call, dim: int, ndim: int) -> int:
    return dim + (dim_of(call.argument("dim"), ndim + 1) <= dim)


def _expanded(call: Call, dim: int, ndim: int) -> int:
    return dim + call.outputs[0].dim() - ndim


MOVED: Final[dict[str, Callable[[Call, int, int], int]]] = {
    "permute": _transposed,
    "transpose": _transposed,
    "t": _transposed,
    "unsqueeze": _unsqueezed,
    "expand": _expanded,
}


def moved(call: Call) -> Value:
    """Follow the row dimension through a view that keeps every element, or repeats it."""
    tensor, rows = the_rows(call)
    return Rows(MOVED[call.name](call, rows.dim, tensor.dim()), rows.order)


def squeezed(call: Call) -> Value:
    """Follow the row dimension when others of size 1 go."""
    tensor, rows = the_rows(call)
    given = call.argument("dim")
    dims = [given] if isinstance(given, int) else list(given or range(tensor.dim()))
    dims = [dim_of(d, tensor.dim()) for d in dims]
    if rows.dim in dims:  # it would go where there is one row
        raise call.unknown()
    ones = [d for d in dims if call.shape(tensor)[d] == 1]
    return Rows(rows.dim - sum(d < rows.dim for d in ones), rows.order)


def selected(call: Call) -> Value | list[Value]:
    """One index, or each, of a dimension that does not hold the rows."""
    tensor, rows = the_rows(call)
    dim = dim_of(call.argument("dim", 0), tensor.dim())
    _not_rows(call, rows, dim)
    return [Rows(rows.dim - (dim < rows.dim), rows.order) for _ in call.outputs]


def _not_rows(call: Call, rows: Rows, dim: int) -> None:
    if dim == rows.dim:
        raise Left(Reason.ROWS_MIXED, f"{call.name} along the rows")


def _pieces(call: Call, order: Order, sizes: list[sympy.Expr]) -> list[Order]:
    pieces = cut(order, sizes)
    if pieces is None:
        raise Left(Reason.ROWS_MIXED, f"{call.name} of rows not where a run of rows ends")
    return pieces


def _kept(call: Call, order: Order, piece: Order) -> Order:
    """Return `piece` of `order`; parts of rows of an unknown order must be whole experts."""
    for segment in piece:
        is_part = is_selected(segment) and segment not in order
        if is_part and not call.facts.note_experts_of(segment):
            detail = f"{call.name} of rows in an order not followed, not where an expert's end"
            raise Left(Reason.ROWS_MIXED, detail)
    return piece


def sliced(call: Call) -> Value:
    """A slice of the rows must start and end where runs of rows do."""
    tensor, rows = the_rows(call)
    if dim_of(call.argument("dim", 0), tensor.dim()) != rows.dim:
        return _by_position(call, rows)[0]
    total = length(rows.order)
    start, end = slice_bounds(call, total)
    if call.facts.formula(call.argument("step", 1)) != 1:
        raise Left(Reason.ROWS_MIXED, "every n-th row")
    if start == 0 and end == total:
        return rows
    _, kept, _ = _pieces(call, rows.order, [start, end - start])
    return Rows(rows.dim, _kept(call, rows.order, kept))


def slice_bounds(call: Call, total: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Return where a slice of a dimension of size `total` starts and ends."""
    given = call.argument("start")
    start = sympy.S.Zero if given is None else _position(call, given, total)
    return start, _position(call, call.argument("end"), total)


def _by_position(call: Call, rows: Rows) -> list[Value]:
    """Parts of each row, at positions that do not come from the counts."""
    if call.reads_counts():
        raise Left(Reason.VALUE_FROM_COUNTS, call.name)
    return [rows for _ in call.outputs]


def _position(call: Call, position: Any, total: sympy.Expr) -> sympy.Expr:
    if position is None or (isinstance(position, int) and position == sys.maxsize):
        return total
    formula = call.facts.formula(position)
    return total + formula if formula.is_Integer and formula < 0 else formula


def split(call: Call) -> Value | list[Value]:
    """A split of the rows must fall between runs of rows."""
    tensor, rows = the_rows(call)
    if dim_of(call.argument("dim", 0), tensor.dim()) != rows.dim:
        return _by_position(call, rows)
    sizes = call.argument("split_sizes")
    if sizes is None:
        raise Left(Reason.ROWS_MIXED, "a split of the rows in equal parts")
    formulas = [call.facts.formula(size) for size in sizes]
    *pieces, rest = _pieces(call, rows.order, formulas)
    if rest:
        raise Left(Reason.ROWS_MIXED, "a split of the rows that leaves some out")
    return [Rows(rows.dim, _kept(call, rows.order, piece)) for piece in pieces]


def joined(call: Call) -> Value:
    """Rows after rows, with constants as padding; or the same rows side by side."""
    parts = [(t, call.value(t)) for t in call.inputs]
    dims = {v.dim for _, v in parts if isinstance(v, Rows)}
    if len(dims) != 1 or any(isinstance(v, FROM_COUNTS) for _, v in parts):
        raise Left(Reason.VALUE_FROM_COUNTS if len(dims) == 1 else Reason.ROWS_MIXED, "cat")
    (row_dim,) = dims
    if any(not isinstance(v, Rows | Fixed) for _, v in parts):
        raise Left(Reason.ROWS_FROM_OUTSIDE, call.name)
    if dim_of(call.argument("dim", 0), call.outputs[0].dim()) != row_dim:
        return _side_by_side(call, parts, row_dim)
    in_graph = (tensor_of(node) for node in call.node.all_input_nodes)
    given = [t for t in in_graph if t is not None]  # autocast gives them one type behind the node
    if all(len({(t.dtype, t.dim()) for t in ts}) == 1 for ts in ([t for t, _ in parts], given)):
        call.known.joins.append(call.node)
    orders = (
        v.order if isinstance(v, Rows) else (padding(call.shape(t)[row_dim]),) for t, v in parts
    )
    return Rows(row_dim, join(orders))


def stacked(call: Call) -> Value:
    """The same rows in a new dimension."""
    seats = {call.value(t) for t in call.inputs}
    rows = seats.pop() if len(seats) == 1 else None
    if not isinstance(rows, Rows):
        raise Left(Reason.ROWS_MIXED, f"{call.name} of rows in different orders")
    new = dim_of(call.argument("dim", 0), call.outputs[0].dim())
    row_dim = rows.dim + (new <= rows.dim)
    return Rows(row_dim, rows.order)


def padded(call: Call) -> Value:
    """Constants around each row, or behind the last."""
    tensor, rows = the_rows(call)
    _by_position(call, rows)
    amounts = list(call.argument("pad"))
    place = 2 * (tensor.dim() - 1 - rows.dim)
    ahead, after = (*amounts[place : place + 2], 0, 0)[:2]
    behind = call.facts.formula(after)
    if ahead != 0 or not behind.is_nonnegative:  # a negative amount cuts rows off
        raise call.unknown()
    return Rows(rows.dim, join([rows.order, (padding(behind),)]))


def _side_by_side(call: Call, parts: list[tuple[torch.Tensor, Value]], row_dim: int) -> Value:
    orders = {v.order for _, v in parts if isinstance(v, Rows)}
    if len(orders) != 1:
        raise Left(Reason.ROWS_MIXED, f"{call.name} of rows in different orders")
    (order,) = orders
    constants = [(t, v) for t, v in parts if isinstance(v, Fixed)]
    if any(not v.is_uniform or call.shape(t)[row_dim] != length(order) for t, v in constants):
        raise Left(Reason.ROWS_FROM_OUTSIDE, call.name)
    dim = dim_of(call.argument("dim", 0), call.outputs[0].dim())
    if any(call.facts.depends_on_counts(t.shape[dim]) for t in call.inputs):
        raise Left(Reason.SIZE_FROM_COUNTS, f"{call.name} of as many columns")
    return Rows(row_dim, order)
