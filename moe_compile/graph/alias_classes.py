"""Classes of tensors of a post-grad graph that share memory when it runs.

Contract
    Two tensors are of one class when their fake values share storage, or when a wait returns one
    for the other: the tracer gives the result of a wait a storage of its own, the run
    does not.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx as fx

from moe_compile.graph.dependence import storages
from moe_compile.graph.query import is_wait


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
