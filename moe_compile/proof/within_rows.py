"""Operators that treat rows apart, by the table of `moe_compile/dims/operators.py`.

Contract
    Rows are a factor of their dimension. Raises Left where, by the table, rows are mixed, or meet
    entries that are not in their order.
    A tensor read beside rows is taken to have a gradient that is a sum over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from moe_compile.dims.factors import Factor, Lost, holds
from moe_compile.dims.flow import Call as DimsCall
from moe_compile.dims.flow import Flow, Followed, Notes, Picked
from moe_compile.dims.operators import follow_operator
from moe_compile.dims.sizes import SizeNumbers
from moe_compile.journal.left import Left
from moe_compile.journal.reasons import Reason
from moe_compile.proof.operator_call import Call
from moe_compile.regions.filled_orders import order_where_all_stand
from moe_compile.regions.row_domain import Fixed, Outside, Rows, Value


class _Lengths(SizeNumbers):
    """Numbers that stand for sizes, by their formulas in the counts."""

    def __init__(self, call: Call, rows: sympy.Expr) -> None:
        super().__init__()
        self._call, self._rows = call, rows

    def product_of(self, size: Any) -> int:
        """Return a number; one of its own for each formula, and for the number of rows."""
        formula = self._call.facts.formula(size)
        if formula.is_Integer and formula != self._rows:
            return int(formula)
        return self.number_for(formula, size)


def within_rows(call: Call) -> Value | list[Value]:
    """Return the results of an operator that treats rows apart; raise Left where it does not."""
    values = [(tensor, call.value(tensor)) for tensor in call.inputs]
    if not all(isinstance(value, Rows | Fixed | Outside) for _, value in values):
        raise call.unknown()
    order = order_where_all_stand(value.order for _, value in values if isinstance(value, Rows))
    if order is None:
        raise Left(Reason.ROWS_MIXED, f"{call.name} of rows in different orders")
    try:
        flow, rows = _followed(call, values)
    except Lost:
        raise call.unknown() from None
    if any(holds(dim, rows) for _, dim in flow.notes.closed):
        raise Left(Reason.ROWS_MIXED, f"{call.name} along the rows")
    for tensor, value in values:
        if not isinstance(value, Rows) and any(holds(dim, rows) for dim in flow.dims(tensor)):
            raise Left(Reason.ROWS_FROM_OUTSIDE, call.name)
        if isinstance(value, Outside):
            call.note_read(value, None, order, is_summed=True)
    return [Rows(_place(call, flow, tensor, rows), order) for tensor in call.outputs]


def _followed(call: Call, values: Sequence[tuple[torch.Tensor, Value]]) -> tuple[Flow, Factor]:
    """Return the flow of factors through the operator, and the factor that is the rows."""
    lengths = [t.shape[value.dim] for t, value in values if isinstance(value, Rows)]
    numbers = _Lengths(call, call.facts.formula(lengths[0]))
    flow, rows = Flow(call.node, numbers, Notes()), Factor(numbers.product_of(lengths[0]))
    for tensor, value in values:
        dims = [[Factor(size)] for size in flow.sizes(tensor)]
        if isinstance(value, Rows):
            dims[value.dim] = [rows]
        flow.put(Followed(tensor, dims))
    picked: list[Picked] = [[] for _ in call.outputs]
    follow_operator(DimsCall(call.node, call.func, call.args, call.kwargs, call.out, flow, picked))
    flow.close([factor] for one in picked for factor, _ in one)
    return flow, rows


def _place(call: Call, flow: Flow, tensor: torch.Tensor, rows: Factor) -> int:
    """Return the dimension of a result that holds the rows, and nothing else."""
    found = [] if flow.of(tensor).dims is None else flow.dims(tensor)
    if found.count([rows]) != 1:
        raise call.unknown()
    return found.index([rows])
