"""Products by a weight, however a program writes them, and their features.

Contract
    A `Linear` computes `x [..., K] -> [..., F]` by one matrix, and adds one bias if any.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.fx as fx
import torch.nn.functional as F

from moe_compile.graph.query import tensor_of

LINEAR: Final = (F.linear, torch._C._nn.linear)
PRODUCT: Final = (torch.matmul, operator.matmul, torch.mm)


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """One product by a weight."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    """`[F, K]`, or `[K, F]` unless `by_rows`."""
    bias: fx.Node | None
    by_rows: bool
    """Whether a row of the weight makes a feature."""


def linear_of(node: fx.Node) -> Linear | None:
    """Return what `node` multiplies by which weight, or None for another operator."""
    if node.op == "call_function" and node.target in LINEAR:
        return _linear(node)
    named = node.op == "call_method" and node.target in ("matmul", "mm", "__matmul__")
    if named or (node.op == "call_function" and node.target in PRODUCT):
        x, weight = (*node.args, None, None)[:2]
        if isinstance(x, fx.Node) and _is_matrix(weight) and not node.kwargs:
            return Linear(node=node, x=x, weight=weight, bias=None, by_rows=False)
    return None


def _linear(node: fx.Node) -> Linear | None:
    names = ("input", "weight", "bias")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    x, weight, bias = (given.get(name) for name in names)
    if not isinstance(x, fx.Node) or not _is_matrix(weight):
        return None
    return Linear(node=node, x=x, weight=weight, bias=bias, by_rows=True)


def _is_matrix(value: Any) -> bool:
    tensor = tensor_of(value) if isinstance(value, fx.Node) else None
    return tensor is not None and tensor.dim() == 2
