"""Nodes that give back the very tensor they are given, and tensors that share memory as they run.

Contract
    A node that gives back its tensor, `x.to(x.dtype)`, `x.contiguous()`, has no place in the graph
    of gradients: its readers add their terms to the gradient of the tensor itself. The tracer kept
    one value for both.
    A node that writes a tensor in place and gives it back, `x.mul_(2)`, makes another value of the
    same tensor: later readers of the tensor, by either name, add to one gradient.
    Two tensors of a post-grad graph are of one class of `AliasClasses` when their fake values share
    storage, or when a wait returns one for the other: the tracer gives the result of a wait a
    storage of its own, the run does not.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx as fx

from moe_compile.graph.dependence import storages, written_arguments
from moe_compile.graph.query import is_launch, is_wait, value_of


def origin(node: fx.Node) -> fx.Node:
    """Return the node that made the tensor which `node` gives back, itself in most cases."""
    while (given := _given_back(node)) is not None:
        node = given
    return node


def maker(node: fx.Node) -> fx.Node:
    """Return the node that made the tensor which `node` gives back, written since or not."""
    while (given := _same(node)) is not None:
        node = given
    return node


def readers(node: fx.Node) -> list[fx.Node]:
    """Return the readers of the tensor that `node` made, through nodes that give it back too.

    A node that writes it, or gives it back among other tensors, may read it for these.
    """
    found: list[fx.Node] = []
    for user in node.users:
        if _given_back(user) is not node:
            found.append(user)
        if _same(user) is node:
            found += readers(user)
        for part in user.users if _is_several(user) else ():
            found += readers(part) if _same(part) is node else []
    return found


def _given_back(node: fx.Node) -> fx.Node | None:
    return None if written_arguments(node) else _same(node)


def _same(node: fx.Node) -> fx.Node | None:
    """Return the input that `node` gives back, whether it writes it or not."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or is_launch(node) or is_wait(node):
        return None
    given = node.all_input_nodes
    given += [i for several in given if _is_several(several) for i in several.all_input_nodes]
    return next((i for i in given if value_of(i) is value), None)


def _is_several(node: fx.Node) -> bool:
    """Whether the node makes several tensors: an operator, whose parts are taken one by one."""
    return isinstance(value_of(node), tuple | list)


class AliasClasses:
    """Classes of storages of one graph; stale once the graph is edited."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        """Read `nodes`, in graph order."""
        self._same_as: dict[int, int] = {}
        for node in nodes:
            source = node.args[0] if is_wait(node) else None
            if isinstance(source, fx.Node) and (classes := self.of(source)):
                for storage in storages(node) - classes:
                    self._same_as.setdefault(storage, min(classes))

    def of(self, *nodes: fx.Node) -> frozenset[int]:
        """Return the classes of the tensors that the nodes produce."""
        return frozenset(self._same_as.get(s, s) for node in nodes for s in storages(node))
