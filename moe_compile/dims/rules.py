"""Follow the factors of tensors through operators that compute, head by head.

Contract
    `is_per_head` names the operators followed. What one of them sums over, or otherwise makes
    depend on all indices of a dimension, is noted in `Tracker.closed`: heads may not be there.
    A dimension that cannot be followed gets a factor of its own: heads in it are lost.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.fx as fx
import torch.nn.functional as F

from moe_compile.dims.arguments import argument, dim_of, joined, moved
from moe_compile.dims.factors import Dims, Factor, Lost, flat, size_of, unify
from moe_compile.dims.tracker import Tracker, is_movement
from moe_compile.graph.dependence import written_arguments
from moe_compile.graph.query import operator_at, value_of

POINTWISE: Final = frozenset(
    {
        "add", "sub", "mul", "truediv", "div", "neg", "pow", "square", "sqrt", "rsqrt", "exp",
        "sin", "cos", "tanh", "sigmoid", "silu", "gelu", "relu",
    }
)  # fmt: skip
CASTS: Final = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16"})
"""Only their first argument gives values."""
NORMS: Final = frozenset({"rms_norm", "layer_norm"})
REDUCTIONS: Final = frozenset({"mean", "sum", "amax"})
HOMES: Final = (torch, F, torch._C._nn, operator)
"""Modules whose functions are known by name."""


def operator_name(node: fx.Node) -> str:
    """Return the name of an operator of PyTorch or Python, as a method or a function, or ""."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    known = any(getattr(home, name, None) is node.target for home in HOMES)
    return name if node.op == "call_function" and known else ""


def is_per_head(node: fx.Node) -> bool:
    """Whether factors can be followed through the node, which may compute."""
    return operator_name(node) in RULES


def step(tracker: Tracker, node: fx.Node) -> None:
    """Find the factors of `node` from those of its inputs, which are known."""
    if is_movement(node):
        tracker.step(node)
    elif not is_per_head(node):
        raise Lost(f"{operator_at(node)} is no operator that factors are followed through")
    elif written_arguments(node):
        raise Lost(f"{operator_at(node)} writes in place")
    else:
        tracker.put(node, RULES[operator_name(node)](tracker, node))


def _source(tracker: Tracker, node: fx.Node) -> Dims:
    return tracker.dims(moved(node))


def _cast(tracker: Tracker, node: fx.Node) -> Dims:
    return _source(tracker, node)


def pointwise(tracker: Tracker, node: fx.Node) -> Dims:
    """Follow an operator whose elements come of elements, broadcast."""
    sizes = tracker.sizes_of(node)
    dims: Dims = [[] for _ in sizes]
    for source in node.all_input_nodes:
        given = tracker.dims(source)
        for i, dim in enumerate(given, len(sizes) - len(given)):
            dims[i] = meeting(dims[i], dim)
    return dims


def meeting(left: list[Factor], right: list[Factor]) -> list[Factor]:
    """Return the factors of a dimension that two tensors share, one broadcast perhaps."""
    left, right = flat(left), flat(right)
    if not left or not right:
        return left or right
    try:
        unify(left, right)
    except Lost:
        return [Factor(size_of(left))]
    return flat(left)


def _normed(tracker: Tracker, node: fx.Node) -> Dims:
    dims = _source(tracker, node)
    shape = argument(node, "normalized_shape")
    if not isinstance(shape, list | tuple) or not shape:
        raise Lost(f"{operator_at(node)} normalises over an unknown dimension")
    tracker.closed += [(node, dim) for dim in dims[-len(shape) :]]
    return dims


def _reduced(tracker: Tracker, node: fx.Node) -> Dims:
    dims = _source(tracker, node)
    given = argument(node, "dim")
    every = list(range(len(dims))) if given is None else [given]
    along = given if isinstance(given, list | tuple) else every
    if not along or not all(isinstance(d, int) for d in along):
        raise Lost(f"{operator_at(node)} reduces an unknown dimension")
    along = [d % len(dims) for d in along]
    tracker.closed += [(node, dims[d]) for d in along]
    if len(tracker.sizes_of(node)) == len(dims):
        return [[] if i in along else dim for i, dim in enumerate(dims)]
    return [dim for i, dim in enumerate(dims) if i not in along]


def _complex(tracker: Tracker, node: fx.Node) -> Dims:
    *dims, parts = _source(tracker, node)
    tracker.closed.append((node, parts))
    return dims


def _real(tracker: Tracker, node: fx.Node) -> Dims:
    return [*_source(tracker, node), [Factor(2)]]


def _unbound(tracker: Tracker, node: fx.Node) -> Dims:
    return _source(tracker, node)


def stacked(tracker: Tracker, node: fx.Node) -> Dims:
    """Follow a stack: the new dimension is a factor of its own."""
    parts = joined(node)
    dims = tracker.dims(parts[0])
    for part in parts[1:]:
        if len(tracker.dims(part)) != len(dims):
            raise Lost(f"{operator_at(node)} stacks tensors with other numbers of dimensions")
        dims = [meeting(a, b) for a, b in zip(dims, tracker.dims(part), strict=True)]
    at = dim_of(node, len(dims) + 1, default=0)
    return [*dims[:at], [Factor(len(parts))], *dims[at:]]


def _item(tracker: Tracker, node: fx.Node) -> Dims:
    source, index = node.args
    assert isinstance(source, fx.Node)
    if operator_name(source) == "unbind":
        return _one_of_unbound(tracker, source)
    if isinstance(value_of(source), torch.Tensor):
        return _indexed(tracker, node, index)
    raise Lost(f"{operator_at(node)} is taken from something unknown")


def _one_of_unbound(tracker: Tracker, unbound: fx.Node) -> Dims:
    dims = tracker.dims(unbound)
    at = dim_of(unbound, len(dims), default=0)
    tracker.closed.append((unbound, dims[at]))
    return [dim for i, dim in enumerate(dims) if i != at]


def _indexed(tracker: Tracker, node: fx.Node, index: Any) -> Dims:
    """Follow slices, numbers, new dimensions and `...`; a slice loses what it cuts."""
    given = tracker.dims(node.all_input_nodes[0])
    indices = list(index) if isinstance(index, tuple) else [index]
    if not all(i is None or i is ... or isinstance(i, int | slice) for i in indices):
        raise Lost(f"{operator_at(node)} indexes by a tensor")
    if ... not in indices:
        indices.append(...)
    at = indices.index(...)
    named = sum(i is not None and i is not ... for i in indices)
    indices[at : at + 1] = [slice(None)] * (len(given) - named)
    dims: Dims = []
    rest = iter(given)
    for one in indices:
        dim = [] if one is None else next(rest)
        if isinstance(one, int):
            tracker.closed.append((node, dim))
        elif one is None or one == slice(None):
            dims.append(dim)
        else:
            tracker.closed.append((node, dim))
            dims.append([Factor(tracker.sizes_of(node)[len(dims)])])
    return dims


RULES: Final[dict[str, Callable[[Tracker, fx.Node], Dims]]] = {
    **dict.fromkeys(POINTWISE, pointwise),
    **dict.fromkeys(CASTS, _cast),
    **dict.fromkeys(NORMS, _normed),
    **dict.fromkeys(REDUCTIONS, _reduced),
    "view_as_complex": _complex,
    "view_as_real": _real,
    "unbind": _unbound,
    "stack": stacked,
    "getitem": _item,
}
