"""Tables with an entry per expert, spread over rows by the group that each row's place is in.

Contract
    A place is in group e where it is below the e-th end and no earlier one. A spread table meets
    rows only where group e holds all rows of expert e and no others, so that its entry, and the
    gradient of it, are of one expert. Rows behind the last group meet constants.

`torch.searchsorted(ends, torch.arange(R), right=True)` gives the groups; a bias per expert with one
entry of zeros behind it, `torch.cat([bias, torch.zeros(1, F)])`, is spread by an index of them.
"""

from __future__ import annotations

import torch

from moe_compile.dims.record import SAME_VALUES
from moe_compile.journal.left import Left
from moe_compile.journal.reasons import Reason
from moe_compile.proof.grouped_rules import check_groups
from moe_compile.proof.operator_call import Call
from moe_compile.regions.row_domain import (
    Formulas,
    GroupOfRow,
    Outside,
    PerExpertTable,
    Rows,
    UnknownIndex,
    Value,
    length,
)


def groups(call: Call) -> Value | None:
    """Return the groups found by a search of each place in their ends; None for another search."""
    ends, places = (call.value(call.argument(name)) for name in ("sorted_sequence", "self"))
    if not isinstance(ends, Formulas) or call.argument("sorted_sequence").dim() != 1:
        return None
    if not isinstance(places, UnknownIndex) or not places.is_arange:
        return None
    is_plain = call.argument("side") is None and call.argument("sorter") is None
    if not is_plain or not call.argument("right"):
        return None
    starts = (0, *ends.cells[:-1])
    return GroupOfRow(sizes=tuple(b - a for a, b in zip(starts, ends.cells, strict=True)))


def entries(call: Call, base: torch.Tensor, dim: int, index: GroupOfRow) -> Value | None:
    """Return a table read by group; None unless it has one entry for each and a constant."""
    table = call.value(base)
    if not isinstance(table, Outside) or dim != 0 or table.behind != 1:
        return None
    if base.shape[0] != len(index.sizes) + 1:
        return None
    return PerExpertTable(table.nodes, index.sizes)


def with_spread(call: Call) -> Value:
    """Return the result of an operator on a spread table: a copy of it, or the rows that it meets.

    Other operators are refused.
    """
    values = [call.value(t) for t in call.inputs]
    if len(values) == 1 and call.name in SAME_VALUES and isinstance(values[0], PerExpertTable):
        return values[0]
    rows = [(t, v) for t, v in zip(call.inputs, values, strict=True) if isinstance(v, Rows)]
    spread = [
        (t, v) for t, v in zip(call.inputs, values, strict=True) if isinstance(v, PerExpertTable)
    ]
    if not call.is_pointwise or len(values) != 2 or len(rows) != 1 or len(spread) != 1:
        raise Left(Reason.ROWS_FROM_OUTSIDE, call.name)
    (tensor, row), (table, entry) = rows[0], spread[0]
    if row.dim != 0 or tensor.dim() != table.dim():
        raise Left(Reason.ROWS_MIXED, f"{call.name} combines rows in different orders")
    if call.shape(table)[0] != length(row.order):
        raise Left(
            Reason.ROWS_MIXED,
            f"{call.name} combines rows with values of experts that were repeated for other rows",
        )
    check_groups(call, row.order, entry.sizes)
    for expert in range(len(entry.sizes)):
        call.known.reads.add(Outside(entry.nodes), expert, expert)
    call.known.has_spread = True
    return Rows(0, row.order)
