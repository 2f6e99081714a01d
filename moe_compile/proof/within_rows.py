"""Operators that treat rows apart, by the table of `moe_compile/dims/operators.py`.

Contract
    Rows are a factor of their dimension. Raises Left where, by the table, rows are mixed, or meet
    entries that are not in their order.
    A product over rows is of rows of one expert only, padded at most by its own count: it rounds by
    their number, and a chunk has all of them.
    A tensor read beside rows is taken to have a gradient that is a sum over them: of terms that
    are each computed of one row, unless it is multiplied by rows as a matrix, or is an operand of
    an elementwise operator that is not in `SUMMED`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import sympy
import torch

from moe_compile.dims.factors import Factor, Lost, SizeNumbers, flat, holds, unify
from moe_compile.dims.flow import Call as DimsCall
from moe_compile.dims.flow import Flow, Followed, Notes, Picked
from moe_compile.dims.operators import follow_operator
from moe_compile.journal.reasons import Left, Reason
from moe_compile.proof.operator_call import Call
from moe_compile.regions.row_domain import (
    Fixed,
    Labels,
    LabelTable,
    Outside,
    Rows,
    Value,
    order_where_all_stand,
)

SUMMED: Final = ("mul", "add", "sub")
"""Elementwise operators whose operands have sums of products as gradients, one per element."""


class _Lengths(SizeNumbers):
    """Numbers that stand for sizes, by their formulas in the counts."""

    def __init__(self, call: Call, rows: sympy.Expr) -> None:
        super().__init__()
        self._call, self._rows = call, rows
        self.rows = self.number_for(rows, 0)
        """The number of rows."""

    def product_of(self, size: Any) -> int:
        """Return a product of numbers and of primes: one for the rows, and for each other factor.

        Rows of a constant number have a prime as well.
        """
        formula = self._call.facts.formula(size)
        powers = formula.as_powers_dict()
        if formula == self._rows or not all(n.is_Integer and n > 0 for n in powers.values()):
            return self.number_for(formula, size)
        number = 1
        for factor, power in powers.items():
            one = int(factor) if factor.is_Integer else self.number_for(factor, size)
            number *= one ** int(power)
        return number


def within_rows(call: Call) -> Value | list[Value]:
    """Return the results of an operator that treats rows apart; raise Left where it does not."""
    values = [(tensor, _with_labels(call.value(tensor))) for tensor in call.inputs]
    if not all(isinstance(value, Rows | Fixed | Outside) for _, value in values):
        raise Left(Reason.VALUE_FROM_COUNTS, call.name)
    order = order_where_all_stand(value.order for _, value in values if isinstance(value, Rows))
    if order is None:
        raise Left(Reason.ROWS_MIXED, f"{call.name} combines rows in different orders")
    rows = [(tensor, value.dim) for tensor, value in values if isinstance(value, Rows)]
    alike = [tensor for tensor, value in values if isinstance(value, Fixed) and value.is_uniform]
    results: list[Value] = [Rows(dim, order) for dim in row_dims(call, rows, alike)]
    in_matrix = call.is_product and any(dim >= tensor.dim() - 2 for tensor, dim in rows)
    if in_matrix and call.expert_of(order) is None:
        detail = (
            f"the rounding of {call.name} depends on the number of rows, and the rows are of "
            "several experts"
        )
        raise Left(Reason.SHARED_PARAMETER, detail)
    factors = call.inputs[-2:] if call.is_product else ()
    may_sum = call.name in SUMMED or not call.is_pointwise
    for tensor, value in values:
        if isinstance(value, Outside):
            is_summed = may_sum and all(tensor is not factor for factor in factors)
            call.note_read(value, None, order, is_summed=is_summed)
    return results


def _with_labels(value: Value) -> Value:
    """Return labels as the rows that they label: each row's is its own, for any counts."""
    if isinstance(value, Labels):
        return Rows(0, value.order)
    return Rows(value.dim, value.order) if isinstance(value, LabelTable) else value


def row_dims(
    call: Call, given: Sequence[tuple[torch.Tensor, int]], alike: Sequence[torch.Tensor] = ()
) -> list[int]:
    """Return the dimension of each result that holds the rows; raise Left where they are mixed.

    `given` are the inputs that have rows, with their dimensions. Of the other inputs those in
    `alike`, which have one value everywhere, may have an entry for each row.
    """
    numbers = _Lengths(call, call.facts.formula(given[0][0].shape[given[0][1]]))
    flow, rows = Flow(call.node, numbers, Notes()), Factor(numbers.rows)
    try:
        for tensor in call.inputs:
            flow.put(Followed(tensor, [[Factor(size)] for size in flow.sizes(tensor)]))
        for tensor, dim in given:
            unify([rows], flow.dims(tensor)[dim])
        picked: list[Picked] = [[] for _ in call.outputs]
        done = DimsCall(call.node, call.func, call.args, call.kwargs, call.out, flow, picked)
        follow_operator(done)
    except Lost:
        _check_sizes(call, flow, rows)
        raise call.unknown() from None
    flow.close([factor] for one in picked for factor, _ in one)
    (rows,) = flat([rows])  # a prime is never split
    _check(call, flow, rows, [tensor for tensor, _ in given], alike)
    return [_place(call, flow, tensor, rows) for tensor in call.outputs]


def _check(
    call: Call,
    flow: Flow,
    rows: Factor,
    have: Sequence[torch.Tensor],
    alike: Sequence[torch.Tensor],
) -> None:
    """Refuse rows that come together, an entry for each in other inputs, and sizes by counts."""
    closed = [dim for _, dim in flow.notes.closed]
    are_mixed = any(holds(dim, rows) for dim in closed)
    for tensor in call.inputs:
        if all(tensor is not one for one in have):
            factors = [factor for dim in flow.dims(tensor) for factor in dim]
            own = [factor for factor in factors if factor is not rows]
            meet = are_mixed and any(holds(dim, factor) for factor in own for dim in closed)
            if meet or (len(own) < len(factors) and all(tensor is not one for one in alike)):
                raise Left(Reason.ROWS_FROM_OUTSIDE, call.name)
    if are_mixed:
        raise Left(
            Reason.ROWS_MIXED,
            f"{call.name} must compute each row by itself, but works along the dimension of "
            "the rows",
        )
    _check_sizes(call, flow, rows)


def _check_sizes(call: Call, flow: Flow, rows: Factor) -> None:
    """Refuse dimensions that do not hold the rows, and are as long as counts say."""
    for tensor in call.inputs:
        for dim, size in zip(flow.dims(tensor), tensor.shape, strict=True):
            if not holds(dim, rows) and call.facts.depends_on_counts(size):
                raise Left(
                    Reason.SIZE_FROM_COUNTS,
                    f"{call.name} has a dimension, other than that of the rows, whose "
                    f"size {size} depends on the counts",
                )


def _place(call: Call, flow: Flow, tensor: torch.Tensor, rows: Factor) -> int:
    """Return the dimension of a result that holds the rows, and nothing else."""
    found = [] if flow.of(tensor).dims is None else flow.dims(tensor)
    if found.count([rows]) > 1:
        raise Left(
            Reason.ROWS_MIXED,
            f"the result of {call.name} must have rows in one dimension, and has rows in two",
        )
    if [rows] not in found:
        raise call.unknown()
    return found.index([rows])
