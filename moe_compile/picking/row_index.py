"""The index that takes rows of a tensor: `x[i]`, `x[i, :]`, `x[None, i]`, `index_select`.

Contract
    An index is a vector along dimension 0: integers, one for each row taken, or a mask that says of
    each row whether it is. What else stands in the brackets keeps all elements.
    A graph is read, not edited.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import sympy
import torch
import torch.fx as fx

from moe_compile.graph.query import argument_of, called_name, is_integer, tensor_of


class RowIndex(NamedTuple):
    """Which rows a node takes, and where they are then."""

    index: fx.Node
    dim: int
    """Dimension of the rows taken."""


def index_of(node: fx.Node) -> RowIndex | None:
    """Return by what `node` takes rows of its first argument; None where it takes none."""
    if called_name(node) == "getitem":
        found = in_brackets(node.args[1])
    elif called_name(node) == "index_select" and argument_of(node, 1, "dim") == 0:
        index = argument_of(node, 2, "index")
        found = RowIndex(index, 0) if isinstance(index, fx.Node) else None
    else:
        return None
    return found if found is not None and is_row_index(found.index) else None


def in_brackets(given: Any) -> RowIndex | None:
    """Return the index among what brackets hold, where it is one for dimension 0."""
    parts = list(given) if isinstance(given, tuple) else [given]
    at = next((i for i, part in enumerate(parts) if part is not None), len(parts))
    index, behind = parts[at] if at < len(parts) else None, parts[at + 1 :]
    keeps = all(part is None or part is ... or part == slice(None) for part in behind)
    return RowIndex(index, at) if isinstance(index, fx.Node) and keeps else None


def is_row_index(index: fx.Node) -> bool:
    """Whether `index` is a vector of integers, or a mask."""
    tensor = tensor_of(index)
    return tensor is not None and tensor.dim() == 1 and (is_integer(index) or is_mask(index))


def is_mask(index: fx.Node) -> bool:
    """Whether `index` says of each row whether it is taken."""
    tensor = tensor_of(index)
    return tensor is not None and tensor.dtype is torch.bool


def num_rows_of(node: fx.Node, dim: int = 0) -> sympy.Symbol | None:
    """Return the size of `dim` of a tensor where the host reads it, None where it does not."""
    tensor = tensor_of(node)
    size = tensor.shape[dim] if tensor is not None and tensor.dim() > dim else None
    if not isinstance(size, torch.SymInt) or not isinstance(size.node.expr, sympy.Symbol):
        return None
    is_read = size.node.shape_env.is_unbacked_symint(size.node.expr)
    return size.node.expr if is_read else None
