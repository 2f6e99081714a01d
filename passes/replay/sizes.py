"""Sizes while a graph is written: numbers where they are known, nodes where they are not."""

from __future__ import annotations

import operator
from typing import Any, Final, TypeAlias

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moe_compile.graph.edit import Emitter
from moe_compile.graph.inner_graphs import bodies
from moe_compile.graph.query import called_name, tensor_of

Size: TypeAlias = int | fx.Node

RESHAPES: Final = ("view", "reshape")


def extent(emit: Emitter, node: fx.Node, dim: int) -> Size:
    """Return the size of dimension `dim` of the tensor `node`."""
    tensor = tensor_of(node)
    size = None if tensor is None else tensor.shape[dim]
    if size is None or isinstance(size, torch.SymInt):
        return emit.method("size", node, dim)
    return int(size)


def most_of(size: int | torch.SymInt) -> int | None:
    """Return the number that a size which is known at run time alone cannot exceed, if any."""
    if isinstance(size, int) or not free_unbacked_symbols(size):
        return None
    most = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(most) if most.is_Integer else None


def times(emit: Emitter, left: Size, right: Size) -> Size:
    """Return the product of two sizes."""
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    return emit.call(operator.mul, left, right)


def name_inferred_size(copied: fx.Node, original: fx.Node) -> None:
    """Write the size for which a reshape has -1, where it is a number in `original`.

    A chunk may be without rows, where torch cannot infer a size beside that of the rows. Functions
    that the node calls, as a checkpoint does, run for chunks as they are: there too.
    """
    for body in bodies(original):
        for inner in body.graph.nodes:
            name_inferred_size(inner, inner)
        body.recompile()
    made = tensor_of(original)
    if called_name(copied) not in RESHAPES or made is None or not copied.args:
        return

    def known(sizes: Any) -> tuple[Any, ...]:
        pairs = zip(sizes, made.shape, strict=True)
        return tuple(n if s == -1 and type(n) is int else s for s, n in pairs)

    source, *sizes = copied.args
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        copied.args = (source, known(sizes[0]))
    elif len(sizes) == made.dim():
        copied.args = (source, *known(sizes))
    for name in {"shape", "size"} & copied.kwargs.keys():
        copied.kwargs = {**copied.kwargs, name: known(copied.kwargs[name])}
