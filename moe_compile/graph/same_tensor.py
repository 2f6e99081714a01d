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
    """Return who reads the tensor that `node` made, by whatever node it was given back.

    A node that gives it back among other tensors may read it for these.
    """
    found: list[fx.Node] = []
    for user in node.users:
        if _given_back(user) is node:
            found += readers(user)
        else:
            found.append(user)
        for part in user.users if _is_several(user) else ():
            found += readers(part) if _given_back(part) is node else []
    return found


def _given_back(node: fx.Node) -> fx.Node | None:
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return None
    if is_launch(node) or is_wait(node) or written_arguments(node):
        return None
    given = node.all_input_nodes
    given += [i for several in given if _is_several(several) for i in several.all_input_nodes]
    return next((i for i in given if value_of(i) is value), None)


def _is_several(node: fx.Node) -> bool:
    """Whether the node makes several tensors: an operator, whose parts are taken one by one."""
    return isinstance(value_of(node), tuple | list)
