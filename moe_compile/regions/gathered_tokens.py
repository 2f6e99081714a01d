"""Find experts whose tokens the model itself gathers, and whose sums it reduces: no all-to-all.

Contract
    Found is an all-gather with a reduce-scatter of as many rows below it over the same group where
    rows are moved twice between them by an index that is chosen by values, as a router chooses
    experts: picked for the experts, and put back. A dense layer between the two, as of sequence
    parallelism, moves no row by such an index, and gathers of parameters no reduce-scatter follows.
    Experts that communicate between the two are not spoken of.
    The answer is a function of the graph's structure, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.query import (
    called_name,
    expression_of,
    group_name,
    is_all_gather,
    is_integer,
    is_launch,
    is_reduce_scatter,
    tensor_of,
    value_of,
    waits_on,
)

BY_INDEX: Final = frozenset(
    {
        "getitem", "setitem", "index_select", "gather", "take_along_dim", "index_add", "index_copy",
        "index_put", "scatter", "scatter_add", "scatter_reduce",
    }
)  # fmt: skip
"""Operators, written in place or not, that move rows by an index."""

MADE: Final = ("zeros", "ones", "empty", "full", "arange", "rand")
"""What names of operators have that read no value of a tensor that they are given."""

PICKED_AND_PUT_BACK: Final = 2


def reduce_scatter_of(
    gather: fx.Node, launches: Collection[fx.Node], dependence: Dependence
) -> fx.Node | None:
    """Return the reduce-scatter of what experts make of the tokens that `gather` brings, or None.

    `launches` are those of the graph, in its order.
    """
    waits = waits_on(gather)
    tokens = tensor_of(waits[-1]) if waits else None
    if not is_all_gather(gather) or tokens is None or not tokens.is_floating_point():
        return None
    below = dependence.below([gather]) - {gather}
    back = next((n for n in launches if n in below and is_reduce_scatter(n)), None)
    sums = tensor_of(back.all_input_nodes[0]) if back is not None else None
    if back is None or sums is None or group_name(back) != group_name(gather):
        return None
    between = (below & dependence.above([back])) - {back}
    if any(is_launch(node) for node in between) or not _as_many_rows(tokens, sums):
        return None
    moves = [node for node in between if _moves_rows(node, between)]
    return back if len(moves) >= PICKED_AND_PUT_BACK else None


def _as_many_rows(tokens: torch.Tensor, sums: torch.Tensor) -> bool:
    rows = [expression_of(t.shape[0]) if t.dim() else None for t in (tokens, sums)]
    return rows[0] is not None and rows[0] == rows[1]


def _moves_rows(node: fx.Node, between: Collection[fx.Node]) -> bool:
    """Whether rows made of the gathered tokens are moved by an index that values chose."""
    if called_name(node).rstrip("_") not in BY_INDEX:
        return False
    moved = [n for n in _read(node) if not _is_index(n)]
    indices = [n for n in _read(node) if _is_index(n)]
    return any(n in between for n in moved) and any(map(_is_chosen, indices))


def _read(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if tensor_of(n) is not None]


def _is_index(node: fx.Node) -> bool:
    tensor = tensor_of(node)
    return is_integer(node) or (tensor is not None and tensor.dtype is torch.bool)


def _is_chosen(index: fx.Node) -> bool:
    """Whether `index` depends on values of floating-point numbers, as by `topk` or a comparison."""
    todo, seen = [index], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in seen or any(name in called_name(node) for name in MADE):
            continue
        seen.add(node)
        tensors = [n for n in node.all_input_nodes if list(_tensors(n))]
        if any(t.is_floating_point() for n in tensors for t in _tensors(n)):
            return True
        todo += tensors
    return False


def _tensors(node: fx.Node) -> Iterable[torch.Tensor]:
    leaves = pytree.tree_leaves(value_of(node))
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
