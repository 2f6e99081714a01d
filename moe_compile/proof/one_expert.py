"""Operators that read rows of one expert alone: whatever they do, a chunk does the same.

Contract
    A chunk of whole experts has all rows of each of its experts, in the order received, and what
    reads nothing else is computed from the same numbers. It must not run in chunks without the
    expert: of no rows it may make what is not a number, or a gradient that is not zero. Chunks of
    tokens have a part of an expert's rows: they need rows that are independent.
"""

from __future__ import annotations

from typing import Final

import torch

from moe_compile.journal.reasons import Reason
from moe_compile.proof.operator_call import SYMBOLIC, Call
from moe_compile.regions.row_domain import (
    Fixed,
    Formulas,
    OfExpert,
    Order,
    Outside,
    Rows,
    Unproven,
    Value,
    length,
)

ANY_ROWS: Final = frozenset(
    {
        Reason.ROWS_MIXED,
        Reason.UNKNOWN_OPERATOR,
        Reason.VALUE_FROM_COUNTS,
        Reason.SIZE_FROM_COUNTS,
        Reason.ROWS_FROM_OUTSIDE,
    }
)
"""What need not be proven of an operator that reads one expert's rows."""


def of_one_expert(call: Call, unproven: Unproven) -> list[Value]:
    """Return what `call`, of which no rule says more, makes; raise `unproven` where it mixes."""
    values = [call.value(t) for t in call.inputs]
    expert = _the_expert(call, values)
    if expert is None or unproven.reason not in ANY_ROWS or not _reads_only(call, values, expert):
        raise unproven
    for value in values:
        if isinstance(value, Outside):
            call.known.reads.add(value, None, expert)
    call.known.whole.setdefault(call.node, set()).add(expert)
    orders = {length(v.order): v.order for v in values if isinstance(v, Rows)}
    return [_result(call, tensor, orders, expert, unproven) for tensor in call.outputs]


def _the_expert(call: Call, values: list[Value]) -> int | None:
    found: set[int | None] = {v.expert for v in values if isinstance(v, OfExpert)}
    found |= {call.facts.is_rows_of_one(v.order) for v in values if isinstance(v, Rows)}
    return found.pop() if len(found) == 1 else None


def _reads_only(call: Call, values: list[Value], expert: int) -> bool:
    """Whether numbers and sizes that the operator reads follow from the expert's counts alone."""
    numbers = [call.facts.formula(a) for a in call.leaves if isinstance(a, SYMBOLIC)]
    for value in values:
        if isinstance(value, Formulas):
            numbers += value.cells
        elif not isinstance(value, Rows | OfExpert | Outside | Fixed):
            return False
    return all(call.facts.experts_of(number) <= {expert} for number in numbers)


def _result(
    call: Call,
    tensor: torch.Tensor,
    orders: dict[object, Order],
    expert: int,
    unproven: Unproven,
) -> Value:
    shape = call.shape(tensor)
    if any(not call.facts.experts_of(size) <= {expert} for size in shape):
        raise unproven
    along = [
        dim for dim, size in enumerate(shape) if call.facts.depends_on_counts(tensor.shape[dim])
    ]
    if len(along) == 1 and shape[along[0]] in orders:
        return Rows(along[0], orders[shape[along[0]]])
    return OfExpert(expert)
