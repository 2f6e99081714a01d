"""Keep a graph as it was, to put it back.

Contract
    `restore` leaves the same Graph object with nodes equal to those at the snapshot: operators,
    arguments, order, names and meta. Node objects are new: analyses of before are stale.
"""

from __future__ import annotations

import torch.fx as fx


class Snapshot:
    """A copy of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        """Copy `graph`; the tensors its meta holds are shared, not copied."""
        self._copy = fx.Graph()
        _copy_into(self._copy, graph)

    def restore(self, graph: fx.Graph) -> None:
        """Make `graph` what it was."""
        for node in reversed(list(graph.nodes)):
            graph.erase_node(node)
        _copy_into(graph, self._copy)


def _copy_into(target: fx.Graph, source: fx.Graph) -> None:
    env: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        env[node] = target.node_copy(node, env.__getitem__)
