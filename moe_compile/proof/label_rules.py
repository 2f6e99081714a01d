"""Labels of rows: integers that are the same for all rows of a run, tables and counts of them.

Contract
    What an operator makes of labels is computed on one label per run, by the operator itself; it
    follows only where the operator does to every row what it does to one.
"""

from __future__ import annotations

from typing import Any, Final

import sympy
import torch
from torch.utils import _pytree as pytree

from moe_compile.proof.operator_call import SAME_VALUES, Call, dim_of
from moe_compile.proof.view_rules import MOVED
from moe_compile.regions.label_bins import bins_of
from moe_compile.regions.row_domain import (
    Fixed,
    Formulas,
    Labels,
    LabelTable,
    Value,
)

MOVES: Final = frozenset(
    {
        "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "select", "unbind", "expand",
        "clone", "alias", "detach", "slice",
    }
)  # fmt: skip
"""Operators that give a vector dimensions of size 1, or take them away."""
WITH_ALL: Final = ("permute", "transpose", "t", "unsqueeze")
INTEGERS: Final = (torch.int32, torch.int64, torch.bool)


def follow(call: Call) -> Value | None:
    """Return what an operator makes of labels; None where it is not followed."""
    if (kept := _same_vector(call)) is not None:
        return kept
    labelled = [(t, v) for t in call.inputs if isinstance(v := call.value(t), Labels | LabelTable)]
    orders = {value.order for _, value in labelled}
    if len(orders) != 1 or call.reads_counts() or call.outputs[0].dtype not in INTEGERS:
        return None
    dim = _dim_of_runs(call, [(t, _dim(v)) for t, v in labelled])
    if dim is None or len(call.outputs) != 1 or (of_runs := _on_runs(call)) is None:
        return None
    (order,) = orders
    if of_runs.dim() == 1:
        return Labels(order, tuple(map(int, of_runs.tolist())))
    return LabelTable(order=order, dim=dim, values=of_runs)


def counted(call: Call) -> Value | None:
    """Return how many rows have each label, as `histc` counts them; None of anything else."""
    labels = call.value(call.inputs[0])
    if call.name != "histc" or not isinstance(labels, Labels):
        return None
    bins, *bounds = (call.argument(name) for name in ("bins", "min", "max"))
    found = bins_of(labels.values, call.inputs[0].dtype, bins, *bounds)
    if found is None:
        return None
    sizes = [
        [segment.length for segment, b in zip(labels.order, found, strict=True) if b == each]
        for each in range(bins)
    ]
    return Formulas(tuple(sympy.Add(*lengths) for lengths in sizes))


def _same_vector(call: Call) -> Value | None:
    """Follow a vector, or one column of one, that gets dimensions of size 1 or loses them."""
    if call.name not in MOVES or len(call.inputs) != 1:
        return None
    value = call.value(call.inputs[0])
    shapes = [call.shape(tensor) for tensor in (*call.inputs, *call.outputs)]
    is_vector = all(shape and all(n == 1 for n in shape[1:]) for shape in shapes)
    if not is_vector or len({shape[0] for shape in shapes}) != 1:
        return None
    return value if isinstance(value, Labels) else None


def _dim(value: Labels | LabelTable) -> int:
    return value.dim if isinstance(value, LabelTable) else 0


def _dim_of_runs(call: Call, labelled: list[tuple[torch.Tensor, int]]) -> int | None:
    """Return which dimension of the result goes along the rows; None where it is not known."""
    (tensor, dim), *others = labelled
    if call.name in WITH_ALL and not others:
        return MOVED[call.name](call, dim, tensor.dim())
    if call.name == "select" and not others:
        selected = dim_of(call.argument("dim"), tensor.dim())
        return None if selected == dim else dim - (selected < dim)
    from_right = {t.dim() - d for t, d in labelled}
    if not (call.is_pointwise or call.name in SAME_VALUES) or len(from_right) != 1:
        return None
    (place,) = from_right
    constants = [t for t in call.inputs if all(t is not labels for labels, _ in labelled)]
    if any(t.dim() >= place and call.shape(t)[-place] != 1 for t in constants):
        return None
    return call.outputs[0].dim() - place


def _on_runs(call: Call) -> torch.Tensor | None:
    """Run the operator on one label per run; None where it reads what is not known."""

    def of_runs(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
        value = call.value(leaf)
        if isinstance(value, Labels):
            labels = torch.tensor(value.values, dtype=leaf.dtype, device="cpu")
            return labels.reshape(-1, *[1] * (leaf.dim() - 1))
        return value.values if isinstance(value, LabelTable | Fixed) else None

    args, kwargs = pytree.tree_map(of_runs, (call.args, call.kwargs))
    leaves = zip(call.leaves, pytree.tree_leaves((args, kwargs)), strict=True)
    if any(isinstance(a, torch.Tensor) and b is None for a, b in leaves):
        return None
    result = call.func(*args, **kwargs)
    return result if isinstance(result, torch.Tensor) else None
