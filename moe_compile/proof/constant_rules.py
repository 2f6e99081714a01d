"""Rules for operators on constants, or on one number: evaluated where they are few integers.

Contract
    A constant whose length depends on counts has one value everywhere, or is none.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from moe_compile.dims.record import SAME_VALUES
from moe_compile.proof.operator_call import (
    SYMBOLIC,
    Call,
    is_small_integer,
)
from moe_compile.regions.row_domain import Fixed, Formulas, UnknownIndex, Value

FILLS: Final = frozenset(
    {
        "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like",
        "new_full", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided",
        "scalar_tensor", "fill", "zero",
    }
)  # fmt: skip
"""Operators that make a tensor of one value; only shape and type of an input matter."""

MOST_CELLS: Final = 1 << 12
"""Most elements of a tensor whose numbers are followed one by one."""

SPREADS: Final = frozenset(
    {
        "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "permute", "transpose", "t",
        "expand", "slice", "select", "split", "split_with_sizes", "unbind", "repeat",
    }
)  # fmt: skip
"""Operators that leave one value everywhere one value everywhere."""


def fill(call: Call) -> Value:
    """Return a new tensor of one value."""
    names = ("fill_value", "value", "s")
    value = next((v for v in map(call.argument, names) if v is not None), 0)
    if isinstance(value, torch.Tensor):
        raise call.unknown()
    if isinstance(value, SYMBOLIC) and call.facts.depends_on_counts(value):
        return _number(call, value)
    empty = "empty" in call.name
    values = _evaluate(call) if is_small_integer(call.outputs[0]) and not empty else None
    zero = not empty and "ones" not in call.name and value == 0
    return Fixed(values=values, is_uniform=True, is_uninitialised=empty, is_zero=zero)


def _number(call: Call, value: Any) -> Value:
    """Return a tensor that holds a number of the host everywhere: `torch.tensor(counts)`."""
    (out,) = call.outputs
    formula = call.facts.formula_written(value)
    is_small = all(type(size) is int for size in out.shape) and out.numel() <= MOST_CELLS
    if formula is None or out.dtype is not torch.int64 or not is_small:
        return UnknownIndex()
    return Formulas((formula,) * out.numel())


def fixed(call: Call) -> Value | list[Value]:
    """Return the results of an operator on constants, whose lengths may depend on the counts.

    The sum of a constant of such a length is no constant: the sum of its ones is a count.
    """
    dependent = call.reads_counts() or call.is_sized_by_counts()
    values = [call.value(t) for t in call.inputs]
    uniform = bool(values) and all(isinstance(v, Fixed) and v.is_uniform for v in values)
    if call.name == "arange" and dependent:
        start = call.facts.formula(call.argument("start", 0))
        step = call.facts.formula(call.argument("step", 1))
        return UnknownIndex(is_arange=bool(start == 0 and step == 1))
    if dependent:
        spread = uniform and (
            call.name in SPREADS or (call.is_pointwise and not call.reads_counts())
        )
        zero = call.name in SAME_VALUES and all(isinstance(v, Fixed) and v.is_zero for v in values)
        empty = any(isinstance(v, Fixed) and v.is_uninitialised for v in values)
        constant = Fixed(is_uniform=True, is_zero=zero, is_uninitialised=empty)
        return [constant if spread else UnknownIndex() for _ in call.outputs]
    whole = all(isinstance(v, Fixed) and v.values is not None for v in values)
    outputs = call.outputs
    if whole and len(outputs) == 1 and is_small_integer(outputs[0]):
        return Fixed(values=_evaluate(call))
    uniform = uniform and (call.name in SPREADS or call.is_pointwise)
    return [Fixed(is_uniform=uniform) for _ in outputs]


def _evaluate(call: Call) -> torch.Tensor | None:
    """Run an operator of torch on the known constants, on the CPU."""
    if call.func.namespace != "aten" or any(isinstance(leaf, torch.SymInt) for leaf in call.leaves):
        return None

    def real(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if isinstance(leaf, torch.Tensor):
            known = call.value(leaf)
            return known.values if isinstance(known, Fixed) else torch.empty(leaf.shape)
        return leaf

    args, kwargs = pytree.tree_map(real, (call.args, call.kwargs))
    result = call.func(*args, **kwargs)
    return result if isinstance(result, torch.Tensor) else None
