"""Keep a graph as it was, to put it back.

Contract
    `restore` leaves the same Graph object with the operators, arguments, order, names and meta
    of the snapshot. Inputs and the output are the very nodes they were: Dynamo keeps attributes
    on them. All other node objects are new: analyses of before are stale.
"""

from __future__ import annotations

import torch.fx as fx


class Snapshot:
    """A copy of a graph whose inputs no pass adds or removes."""

    def __init__(self, graph: fx.Graph) -> None:
        """Copy `graph`; the tensors its meta holds are shared, not copied."""
        self._copy = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            env[node] = _copy(self._copy, node, env)

    def restore(self, graph: fx.Graph) -> None:
        """Make `graph` what it was."""
        inputs = graph.find_nodes(op="placeholder")
        (output,) = graph.find_nodes(op="output")
        output.args = ()
        for node in reversed(list(graph.nodes)):
            if node is not output and node.op != "placeholder":
                graph.erase_node(node)
        kept = self._copy.find_nodes(op="placeholder")
        env = dict(zip(kept, inputs, strict=True))
        with graph.inserting_before(output):
            for node in self._copy.nodes:
                if node.op == "output":
                    output.args = fx.node.map_arg(node.args, env.__getitem__)
                elif node not in env:
                    env[node] = _copy(graph, node, env)


def _copy(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    copied = graph.node_copy(node, env.__getitem__)
    copied.name = node.name
    return copied
