"""Grouped GEMMs, and tables with an entry per expert: rows up to each offset are of one expert.

Contract
    Group e of a product holds all rows of expert e and no others. For rows chosen by an index not
    followed this is assumed where sizes allow it, and noted as a premise to be checked.
    A table with an entry per expert is spread over rows by the group that each row's place is in. A
    place is in group e where it is below the e-th end and no earlier one. A spread table meets
    rows only where group e holds all rows of expert e and no others, so that its entry, and the
    gradient of it, are of one expert. Rows behind the last group meet constants.

`torch.searchsorted(ends, torch.arange(R), right=True)` gives the groups; a bias per expert with one
entry of zeros behind it, `torch.cat([bias, torch.zeros(1, F)])`, is spread by an index of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
import torch.fx as fx

from moe_compile.dims.record import SAME_VALUES
from moe_compile.graph.query import tensor_of
from moe_compile.journal.reasons import Left, Reason
from moe_compile.proof.operator_call import Call, Knowledge
from moe_compile.regions.count_facts import Premise
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.row_domain import (
    FROM_COUNTS,
    Formulas,
    GroupOfRow,
    Order,
    Outside,
    PerExpertTable,
    Rows,
    Selected,
    UnknownIndex,
    Value,
    cut,
    is_padding,
    length,
)


def grouped_matmul(call: Call) -> Value:
    """`[R, K]` by `[E, K, N]`: rows up to each offset by the next matrix."""
    rows = call.value(call.argument("self"))
    weight = call.argument("mat2")
    matrices, offs = call.value(weight), call.argument("offs")
    if not isinstance(rows, Rows) or rows.dim != 0 or isinstance(matrices, Rows):
        raise Left(Reason.ROWS_MIXED, f"{call.name} sums over rows, which must stay apart")
    if offs is None or weight.dim() != 3 or call.argument("bias") is not None:
        raise call.unknown()
    ends = call.value(offs)
    experts = range(call.facts.num_local_experts)
    if not isinstance(ends, Formulas) or len(ends.cells) != len(experts):
        raise Left(
            Reason.SHARED_PARAMETER,
            ("each expert must have one group, and the offsets do not give one group for each"),
        )
    sizes = [b - a for a, b in zip((0, *ends.cells[:-1]), ends.cells, strict=True)]
    check_groups(call, rows.order, sizes)
    if call.facts.premises:
        call.facts.group_ends.append(offs)
    _note_reads(call, matrices)
    padding = [call.facts.left_without(size, e) for e, size in enumerate(sizes)]
    known = tuple(num for num in padding if num is not None and num >= 0)
    why_not = None
    if len(known) < len(padding):
        why_not = "the padding of every expert's group must have a known size, and one has not"
    if call.node in call.known.grouped:
        why_not = "one operator runs several grouped GEMMs, which megamoe does not follow"
    call.known.grouped[call.node] = why_not
    call.known.padding[call.node] = known
    return rows


def _note_reads(call: Call, matrices: Value) -> None:
    if isinstance(matrices, FROM_COUNTS):
        raise Left(Reason.VALUE_FROM_COUNTS, call.name)
    for expert in range(call.facts.num_local_experts):
        if isinstance(matrices, Outside):
            call.known.reads.add(matrices, expert, expert)


def check_groups(call: Call, order: Order, sizes: Sequence[sympy.Expr]) -> None:
    """Refuse unless group e holds all rows of expert e, and no others."""
    chosen = order[0].rows if order and order[0].start == 0 else None
    if isinstance(chosen, Selected):
        for expert, size in enumerate(sizes):
            own = call.facts.experts_of(size) == {expert}
            if not own or not call.facts.has_room_for(size, expert, chosen):
                detail = f"group {expert} is not proven to hold the rows of expert {expert}"
                raise Left(Reason.SHARED_PARAMETER, detail)
            start = sympy.Add(*sizes[:expert])
            call.facts.premises.append(Premise(chosen, start, size, frozenset([expert])))
        call.facts.note_all_rows(chosen, length(order))
        return
    pieces = cut(order, sizes)
    if pieces is None or any(
        call.expert_of(piece) != expert for expert, piece in enumerate(pieces[:-1])
    ):
        raise Left(
            Reason.SHARED_PARAMETER,
            "each group must hold rows of one expert alone, and one holds rows of another expert",
        )
    if not all(is_padding(segment) for segment in pieces[-1]):
        raise Left(
            Reason.ROWS_MIXED,
            "every row must be in a group, and there are rows after the last group",
        )


def why_not_sliceable(region: MoERegion, known: Knowledge, gemm: fx.Node) -> str | None:
    """Return why a grouped GEMM is not in the form whose operands can be sliced, or None."""
    weight = gemm.args[1] if len(gemm.args) > 1 else None
    if weight not in region.others or gemm.kwargs.get("offs") not in region.count_side:
        return (
            "its weight does not come from outside the region, or its offsets are not computed "
            "from the counts alone"
        )
    tensor = tensor_of(weight)
    if tensor is None or not (tensor.is_contiguous() or tensor.mT.is_contiguous()):
        return "each expert's matrix of its weight must be contiguous in memory, and is not"
    if known.has_spread and any(known.padding[gemm]):
        return (
            "padding rows of other experts' groups read a bias, and a sliced GEMM would not fill "
            "these rows"
        )
    return None


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
