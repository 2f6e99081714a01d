"""Sizes while a graph is written: numbers where they are known, nodes where they are not."""

from __future__ import annotations

import operator
from typing import TypeAlias

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import tensor_of

Size: TypeAlias = int | fx.Node


def extent(emit: Emitter, node: fx.Node, dim: int) -> Size:
    """Return the size of dimension `dim` of the tensor `node`."""
    tensor = tensor_of(node)
    size = None if tensor is None else tensor.shape[dim]
    if size is None or isinstance(size, torch.SymInt):
        return emit.method("size", node, dim)
    return int(size)


def times(emit: Emitter, left: Size, right: Size) -> Size:
    """Return the product of two sizes."""
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    return emit.call(operator.mul, left, right)
