"""What is made of tensors from outside a region alone: of which of them, and of which entry.

Contract
    An entry is told only where it was taken from a tensor as the region was given it.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_compile.journal.reasons import Reason
from moe_compile.proof.operator_call import Call, dim_of
from moe_compile.regions.row_domain import Outside, Unproven, Value


def from_outside(call: Call, given: Sequence[Outside]) -> Value | list[Value]:
    """Return what an operator makes of tensors from outside and constants."""
    nodes = frozenset(node for value in given for node in value.nodes)
    counted = call.reads_counts() or call.is_sized_by_counts()
    if counted and call.name != "expand":
        raise Unproven(Reason.VALUE_FROM_COUNTS, call.name)
    entries = _entries(call) if [value.is_given for value in given] == [True] else None
    if entries is not None:
        return [Outside(nodes, part=entry) for entry in entries]
    parts = {value.part for value in given}
    return Outside(nodes, part=parts.pop() if len(parts) == 1 else None)


def _entries(call: Call) -> list[int] | None:
    """Return which entry along dim 0 each result is; None where it is not one."""
    tensor = call.inputs[0]
    if call.name not in ("select", "unbind") or dim_of(call.argument("dim", 0), tensor.dim()):
        return None
    size, index = tensor.shape[0], call.argument("index")
    if call.name == "unbind":
        return [*range(len(call.outputs))]
    known = type(index) is int and isinstance(size, int)
    return [index % size] if known else None
