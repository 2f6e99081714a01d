"""Names of operators that nodes call, and arguments of those that move data.

Contract
    A call that names an argument which its operator is not known to have raises Lost: no default is
    used that the call may replace.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.fx as fx
import torch.nn.functional as F

from moe_compile.dims.factors import Lost
from moe_compile.graph.query import argument_of, called_name, operator_at, tensor_of

PARAMETERS: Final[dict[str, tuple[str, ...]]] = {
    "view": ("input", "size"),
    "reshape": ("input", "shape"),
    "flatten": ("input", "start_dim", "end_dim"),
    "unflatten": ("input", "dim", "sizes"),
    "squeeze": ("input", "dim"),
    "unsqueeze": ("input", "dim"),
    "view_as": ("input", "other"),
    "reshape_as": ("input", "other"),
    "contiguous": ("input", "memory_format"),
    "clone": ("input", "memory_format"),
    "transpose": ("input", "dim0", "dim1"),
    "swapaxes": ("input", "axis0", "axis1"),
    "movedim": ("input", "source", "destination"),
    "moveaxis": ("input", "source", "destination"),
    "split": ("input", "split_size", "dim"),
    "chunk": ("input", "chunks", "dim"),
    "permute": ("input", "dims"),
    "expand": ("input", "size"),
    "repeat_interleave": ("input", "repeats", "dim"),
    "cat": ("tensors", "dim"),
    "stack": ("tensors", "dim"),
}
"""Operator that moves data -> its arguments in order, the value that it moves first."""

CASTS: Final = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16"})
"""Casts: only their first argument gives values."""
HOMES: Final = (torch, torch.functional, F, torch._C._nn, operator)
"""Modules whose functions are known by name."""
ALSO_CALLED: Final = {
    "axis": "dim",
    "a": "input",
    "x": "input",
    "x1": "input",
    "tensor": "input",
    "split_size_or_sections": "split_size",
}
"""Other names that torch takes: NumPy's, and those of its functions that are written in Python."""


def argument(call: fx.Node, name: str, default: Any = None) -> Any:
    """Return the argument `name` of `call`, of an operator in `PARAMETERS`, or `default`."""
    parameters = PARAMETERS[called_name(call)]
    names = {ALSO_CALLED.get(given, given): given for given in call.kwargs}
    if unknown := sorted(names.keys() - set(parameters)):
        raise Lost(
            f"{operator_at(call)} has arguments for which megamoe has no rule: {', '.join(unknown)}"
        )
    return argument_of(call, parameters.index(name), names.get(name, name), default)


def dim_of(call: fx.Node, num_dims: int, default: int | None = None) -> int:
    """Return the dimension that `call` works along, from the left."""
    return from_left(argument(call, "dim", default), num_dims)


def from_left(dim: Any, num_dims: int) -> int:
    """Return a dimension counted from the left."""
    if not isinstance(dim, int):
        raise Lost("dimensions must be given as Python numbers, and one is known at run time only")
    return dim % num_dims


def moved(call: fx.Node) -> fx.Node:
    """Return the value that `call` moves or reads; of an operator with others, the first."""
    parameters = PARAMETERS.get(called_name(call))
    found = argument(call, parameters[0]) if parameters else argument_of(call, 0, "input")
    if not isinstance(found, fx.Node):
        raise Lost(f"megamoe cannot tell which argument of {operator_at(call)} is its input")
    return found


def values_moved(call: fx.Node) -> list[fx.Node]:
    """Return every value that `call` moves: several where it joins them."""
    return joined(call) if "tensors" in PARAMETERS.get(called_name(call), ()) else [moved(call)]


def joined(call: fx.Node) -> list[fx.Node]:
    """Return the values that `call` concatenates or stacks."""
    parts = argument(call, "tensors")
    if not isinstance(parts, list | tuple) or not all(isinstance(p, fx.Node) for p in parts):
        raise Lost(
            f"{operator_at(call)} must concatenate or stack a list of tensors of the graph, "
            "and does not"
        )
    return list(parts)


def operator_name(node: fx.Node) -> str:
    """Return the name of an operator of PyTorch or Python, as a method or a function, or ""."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    known = any(getattr(home, name, None) is node.target for home in HOMES)
    return name if node.op == "call_function" and known else ""


def one_index(node: fx.Node) -> tuple[int, int] | None:
    """Return the dimension and the index that `x[:, i]` or a `select` takes; None for another."""
    source = node.all_input_nodes[0]
    tensor = tensor_of(source)
    if tensor is None or len(node.all_input_nodes) > 1:
        return None
    if operator_name(node) == "select":
        dim, index = argument_of(node, 1, "dim"), argument_of(node, 2, "index")
        is_known = isinstance(dim, int) and isinstance(index, int)
        return (from_left(dim, tensor.dim()), index) if is_known else None
    given = node.args[1]
    indices: Sequence[Any] = given if isinstance(given, tuple) else (given,)
    at = len(indices) - 1
    leading = all(one == slice(None) for one in indices[:-1])
    return (at, indices[-1]) if leading and type(indices[-1]) is int else None
