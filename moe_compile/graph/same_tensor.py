"""Nodes that give back the very tensor they are given: `x.to(x.dtype)`, `x.contiguous()`.

Contract
    Such a node has no place in the graph of gradients: what reads it adds its term to the gradient
    of the tensor itself. The tracer kept one value for both.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from moe_compile.graph.dependence import written_arguments
from moe_compile.graph.query import is_launch, is_wait, value_of


def origin(node: fx.Node) -> fx.Node:
    """Return the node that made the tensor which `node` gives back, itself in most cases."""
    while (given := _given_back(node)) is not None:
        node = given
    return node


def readers(node: fx.Node) -> list[fx.Node]:
    """Return who reads the tensor that `node` made, by whatever node it was given back."""
    found: list[fx.Node] = []
    for user in node.users:
        found += readers(user) if _given_back(user) is node else [user]
    return found


def _given_back(node: fx.Node) -> fx.Node | None:
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return None
    if is_launch(node) or is_wait(node) or written_arguments(node):
        return None
    return next((i for i in node.all_input_nodes if value_of(i) is value), None)
