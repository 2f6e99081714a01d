"""Rules for operators on rows: rows stay independent of one another, or the proof ends.

Contract
    A rule returns rows only where row i of the output depends on row i of the inputs, on
    constants and on the parameters of its expert. Last bits of a row may depend on where it lies
    in memory: rules do not ask (kernel_bits.py).
    The number of rows stands in one dimension, that of the rows; every other is known without
    the counts. An argument that no rule looks at has its default value, or the call is refused.

Views, elementwise operators, products and all else that treats rows apart are followed by one table
of operators (within_rows.py). The rules here are for operators whose rows the counts tell: where
they are cut and joined, and which of them an index takes.

A tensor made from tensors outside the region alone records which ones, and which entry. An entry
is recorded only where it was taken from an input of the region itself.

`UNDERSTOOD` has the arguments that the rules look at, by operator; the table reads all of its own.
A call that gives any other argument a value other than its default is refused: that argument
may change which rows meet, or how a gradient is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from moe_compile.journal.reasons import Left, Reason
from moe_compile.proof import (
    constants,
    count_rules,
    grouped_rules,
    index_rules,
    order_rules,
    view_rules,
)
from moe_compile.proof.index_rules import WRITES
from moe_compile.proof.operator_call import SIZED, Call, Rule, dim_of
from moe_compile.proof.within_rows import within_rows
from moe_compile.regions.row_domain import (
    FROM_COUNTS,
    OfExpert,
    Outside,
    PerExpertTable,
    Rows,
    Value,
)


def copied(call: Call) -> Value | None:
    """The source of `copy`; the values it is written over do not matter."""
    source = call.argument("src")
    value = call.value(source)
    if isinstance(value, Rows) and call.shape(source) == call.shape(call.outputs[0]):
        return value
    return None


ROW_RULES: Final[dict[str, Rule]] = {
    "squeeze": view_rules.squeezed,
    "slice": view_rules.sliced,
    "split": view_rules.split,
    "split_with_sizes": view_rules.split,
    "cat": view_rules.joined,
    "constant_pad_nd": view_rules.padded,
    "copy": copied,
    "_grouped_mm": grouped_rules.grouped_matmul,
}  # fmt: skip
"""Operators along the rows, where the counts say which rows these are; all others are followed by
the table of `moe_compile/dims/operators.py`."""


def apply(call: Call) -> Value | list[Value]:
    """Return the values of the results of `call`; raise Left where they are not known."""
    if call.name in constants.FILLS:
        return constants.fill(call)
    values = [call.value(t) for t in call.inputs]
    if any(isinstance(v, OfExpert) for v in values):
        raise Left(
            Reason.ROWS_MIXED,
            f"{call.name} must compute each row by itself, but reads a value that is computed "
            "from all rows of an expert",
        )
    if any(isinstance(v, PerExpertTable) for v in values):
        return grouped_rules.with_spread(call)
    has_rows = any(isinstance(v, Rows) for v in values)
    if not has_rows and not any(isinstance(v, FROM_COUNTS) for v in values):
        given = [v for v in values if isinstance(v, Outside)]
        return from_outside(call, given) if given else constants.fixed(call)
    check_arguments(call)
    result = _indexed(call)
    if result is None:
        result = _on_rows(call) if has_rows else count_rules.from_counts(call)
    return result


def _indexed(call: Call) -> Value | list[Value] | None:
    if call.name in ("index", "index_select", "gather", "embedding"):
        return index_rules.gather(call)
    if call.name in WRITES:
        return index_rules.scatter(call)
    if call.name == "sort" and not isinstance(call.value(call.inputs[0]), Rows):
        return order_rules.sort(call)
    if call.name == "searchsorted":
        return grouped_rules.groups(call)
    if call.name == "nonzero":
        return order_rules.nonzero(call)
    return order_rules.repeat_interleave(call) if call.name == "repeat_interleave" else None


def _on_rows(call: Call) -> Value | list[Value]:
    rule = ROW_RULES.get(call.name)
    if rule is not None and (found := rule(call)) is not None:
        return found
    if call.reads_counts() and call.name not in SIZED:
        raise Left(Reason.VALUE_FROM_COUNTS, call.name)
    return within_rows(call)


def from_outside(call: Call, given: Sequence[Outside]) -> Value | list[Value]:
    """Return the results of an operator on tensors from outside and constants."""
    nodes = frozenset(node for value in given for node in value.nodes)
    counted = call.reads_counts() or call.is_sized_by_counts()
    if counted and call.name != "expand":
        raise Left(Reason.VALUE_FROM_COUNTS, call.name)
    entries = _entries(call) if [value.is_given for value in given] == [True] else None
    if entries is not None:
        return [Outside(nodes, part=entry) for entry in entries]
    parts = {value.part for value in given}
    return Outside(nodes, part=parts.pop() if len(parts) == 1 else None)


def _entries(call: Call) -> list[int] | None:
    """Return the entry along dim 0 that each result is; None where it is not one."""
    tensor = call.inputs[0]
    if call.name not in ("select", "unbind") or dim_of(call.argument("dim", 0), tensor.dim()):
        return None
    size, index = tensor.shape[0], call.argument("index")
    if call.name == "unbind":
        return [*range(len(call.outputs))]
    known = type(index) is int and isinstance(size, int)
    return [index % size] if known else None


UNDERSTOOD: Final[dict[str, frozenset[str]]] = {
    "view": frozenset({"self", "size"}),
    "squeeze": frozenset({"self", "dim"}),
    "slice": frozenset({"self", "dim", "start", "end", "step"}),
    "split": frozenset({"self", "split_size", "dim"}),
    "split_with_sizes": frozenset({"self", "split_sizes", "dim"}),
    "cat": frozenset({"tensors", "dim"}),
    "constant_pad_nd": frozenset({"self", "pad", "value"}),
    "_grouped_mm": frozenset({"self", "mat2", "offs", "out_dtype"}),
    "index": frozenset({"self", "indices"}),
    "index_select": frozenset({"self", "dim", "index"}),
    "gather": frozenset({"self", "dim", "index"}),
    "embedding": frozenset({"weight", "indices"}),
    "index_put": frozenset({"self", "indices", "values", "accumulate"}),
    "_unsafe_index_put": frozenset({"self", "indices", "values", "accumulate"}),
    "index_copy": frozenset({"self", "dim", "index", "source"}),
    "index_add": frozenset({"self", "dim", "index", "source"}),
    "scatter": frozenset({"self", "dim", "index", "src"}),
    "scatter_add": frozenset({"self", "dim", "index", "src"}),
    "repeat_interleave": frozenset({"repeats", "output_size"}),
    "nonzero": frozenset({"self"}),
    "histc": frozenset({"self", "bins", "min", "max"}),
}  # fmt: skip


def check_arguments(call: Call) -> None:
    """Raise Left where an argument that no rule looks at has another value than its default."""
    understood = UNDERSTOOD.get(call.name)
    if understood is None:
        return
    for declared in call.func._schema.arguments:
        if declared.name not in understood:
            given, default = call.argument(declared.name), declared.default_value
            # types first: a size known only at run time has no value to compare
            if (type(given), given) != (type(default), default):
                raise Left(
                    Reason.UNKNOWN_OPERATOR,
                    f"{call.name} is called with the argument {declared.name}, for which "
                    "megamoe has no rule",
                )
