"""Grouped GEMMs: rows up to each offset by the next expert's matrix.

Contract
    Group e holds all rows of expert e and no others. For rows chosen by an index not followed this
    is assumed where sizes allow it, and noted as a premise to be checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch.fx as fx

from moe_compile.graph.query import tensor_of
from moe_compile.journal.left import Left
from moe_compile.journal.reasons import Reason
from moe_compile.proof.operator_call import Call, Knowledge
from moe_compile.regions.count_facts import Premise
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.row_domain import (
    FROM_COUNTS,
    Formulas,
    Order,
    Outside,
    Rows,
    Selected,
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
        raise Left(Reason.ROWS_MIXED, f"{call.name} sums over the rows")
    if offs is None or weight.dim() != 3 or call.argument("bias") is not None:
        raise call.unknown()
    ends = call.value(offs)
    experts = range(call.facts.num_local_experts)
    if not isinstance(ends, Formulas) or len(ends.cells) != len(experts):
        raise Left(
            Reason.SHARED_PARAMETER, ("the offsets could not be matched to one group per expert")
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
        why_not = "the padding of other experts' groups has no known size"
    if call.node in call.known.grouped:
        why_not = "one operator runs several grouped GEMMs"
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
        raise Left(Reason.SHARED_PARAMETER, "a group holds rows of another expert")
    if not all(is_padding(segment) for segment in pieces[-1]):
        raise Left(Reason.ROWS_MIXED, "there are rows after the last group")


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
        return "the matrices of its weight are not contiguous in memory"
    if known.has_spread and any(known.padding[gemm]):
        return (
            "padding rows of other experts' groups read a bias, and a sliced GEMM would not fill "
            "these rows"
        )
    return None
