"""Whether experts with a capacity stand between exchanges whose sizes are symbols.

Contract
    Says only that they were meant: factors are followed where sizes are numbers. Experts have
    weights by index, in a batched product, or each part of what is joined has weights of its own,
    all of one shape, as those of a loop over experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.attention.head_rules import operator_name
from moe_compile.attention.head_tracking import move_name
from moe_compile.attention.move_arguments import joined
from moe_compile.graph.query import tensor_of, value_of

BATCHED: Final = frozenset({"einsum", "matmul", "bmm", "baddbmm"})
PRODUCTS: Final = BATCHED | {"mm", "linear", "addmm"}
OF_ALL: Final = 3
"""Dimensions of weights of all experts."""

Weights = frozenset[fx.Node]


def are_experts_of_unknown_size(body: Sequence[fx.Node]) -> bool:
    """Whether `body`, in graph order, has a size that is no number, and weights of experts."""
    sizes = [s for n in body for t in _tensors(value_of(n)) for s in t.shape]
    if all(isinstance(size, int) for size in sizes):
        return False
    above: dict[fx.Node, Weights] = {}
    for node in body:
        name = operator_name(node) or move_name(node)
        own = _weights(node) if name in PRODUCTS else frozenset()
        if name in BATCHED and any(len(_shape(weight)) >= OF_ALL for weight in own):
            return True
        if name in ("cat", "stack") and _have_their_own([above.get(p) for p in joined(node)]):
            return True
        above[node] = own.union(*(above.get(i, frozenset()) for i in node.all_input_nodes))
    return False


def is_weight(operand: fx.Node) -> bool:
    """Whether `operand` is made of parameters alone."""
    todo, seen = [operand], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    given = [n for n in seen if not n.all_input_nodes]
    return all(n.op == "get_attr" or isinstance(value_of(n), torch.nn.Parameter) for n in given)


def _weights(product: fx.Node) -> Weights:
    return frozenset(i for i in product.all_input_nodes if len(_shape(i)) > 1 and is_weight(i))


def _have_their_own(parts: Sequence[Weights | None]) -> bool:
    """Whether each of several parts is made by weights that no other is, all of the same shapes."""
    known = [part for part in parts if part]
    if len(known) < len(parts) or len(parts) < 2:
        return False
    own = [part - frozenset().union(*(p for p in known if p is not part)) for part in known]
    shapes = {tuple(sorted(map(str, map(_shape, weights)))) for weights in own}
    return all(own) and len(shapes) == 1


def _shape(node: fx.Node) -> tuple[object, ...]:
    tensor = tensor_of(node)
    return () if tensor is None else tuple(tensor.shape)


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
