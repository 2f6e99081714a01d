"""Constants of a region's body: inputs made by factories, and operators on them or on one number.

Contract
    A node is constant only if no tensor that shares its memory is written anywhere in the graph.
    An operator on constants is evaluated where they are few integers. A constant whose length
    depends on counts has one value everywhere, or is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.dims.record import SAME_VALUES
from moe_compile.graph.dependence import storages
from moe_compile.graph.effects import may_draw
from moe_compile.graph.query import argument_of, is_launch, tensor_of
from moe_compile.proof.operator_call import (
    SYMBOLIC,
    Call,
    is_small_integer,
)
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.row_domain import Fixed, Formulas, UnknownIndex, Value

CONCATENATIONS: Final = (torch.cat, torch.concat, torch.concatenate)
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


def constant_nodes(region: MoERegion) -> list[fx.Node]:
    """Return the inputs of `region` made of constants alone, and the nodes that make them."""
    graph = region.result.graph
    needed = _above(_constants(region), region.others)
    return [node for node in graph.nodes if node in needed]


def constants_behind(node: fx.Node, region: MoERegion) -> int:
    """Return the number of constant entries that `node` puts behind one tensor along dim 0."""
    if node.target not in CONCATENATIONS or argument_of(node, 1, "dim", 0) != 0:
        return 0
    parts = argument_of(node, 0, "tensors")
    if len(parts) != 2 or storages(node) & region.facts.dependence.written:
        return 0
    behind = tensor_of(parts[1]) if parts[1] in _constants(region) else None
    size = behind.shape[0] if behind is not None and behind.dim() else 0
    return size if isinstance(size, int) else 0


def _constants(region: MoERegion) -> set[fx.Node]:
    constant, written = set[fx.Node](), region.facts.dependence.written
    for node in region.result.graph.nodes:
        tensor = tensor_of(node)
        if tensor is None or not _is_call(node) or storages(node) & written:
            continue
        if all(i in constant for i in node.all_input_nodes):
            constant.add(node)
    return constant


def _is_call(node: fx.Node) -> bool:
    """Whether the node is a call that gives the same each time; custom operators may not."""
    is_call = node.op in ("call_function", "call_method") and not is_launch(node)
    return is_call and not may_draw(node)


def _above(constant: set[fx.Node], starts: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = [node for node in starts if node in constant]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


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
