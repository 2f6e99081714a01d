"""Keep a graph as it was, to put it back.

Contract
    `restore` leaves the same Graph object with the operators, arguments, order, names and meta
    of the snapshot. Inputs and the output are the very nodes they were: Dynamo keeps attributes
    on them. All other node objects are new: analyses of before are stale.
    A snapshot is taken before every pass and used by few: it refers to arguments, which fx never
    changes in place, and copies no node.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Final

import torch.fx as fx

VALUES: Final = ("val", "example_value")
"""Keys in the meta of a node: its value by the tracer."""


class Snapshot:
    """The former state of a graph whose inputs no pass adds or removes."""

    def __init__(self, graph: fx.Graph) -> None:
        """Look at `graph`; the tensors its meta holds are shared, not copied."""
        self._nodes = [_Node.of(node) for node in graph.nodes]

    def holds(self, graph: fx.Graph) -> bool:
        """Whether `graph` has the same nodes in the same order, which call and read the same."""
        pairs = itertools.zip_longest(self._nodes, graph.nodes)
        return all(kept is not None and kept.is_still(node) for kept, node in pairs)

    def restore(self, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
        """Make `graph` what it was; return each old node with the new one in its place."""
        (output,) = graph.find_nodes(op="output")
        output.args = ()
        made = [n for n in graph.nodes if n is not output and n.op != "placeholder"]
        for node in made:  # in whatever order a pass left them
            node.args, node.kwargs = (), {}
        for node in made:
            graph.erase_node(node)
        env: dict[fx.Node, fx.Node] = {}
        with graph.inserting_before(output):
            for kept in self._nodes:
                if kept.op == "output":
                    output.args = fx.node.map_arg(kept.args, env.__getitem__)
                elif kept.op == "placeholder":
                    env[kept.node] = kept.node
                else:
                    env[kept.node] = kept.copy_to(graph, env)
        return env


@dataclass(frozen=True, slots=True)
class _Node:
    """The former state of a node."""

    node: fx.Node
    """The node of the snapshot's time: it may have been erased since."""
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    meta: dict[str, Any]

    @staticmethod
    def of(node: fx.Node) -> _Node:
        return _Node(node, node.op, node.target, node.args, node.kwargs, node.name, dict(node.meta))

    def is_still(self, node: fx.Node | None) -> bool:
        """Whether `node` is the same, and calls and reads the same; its value too."""
        return (
            node is self.node
            and node.target is self.target
            and node.args is self.args
            and node.kwargs is self.kwargs
            and all(node.meta.get(key) is self.meta.get(key) for key in VALUES)
        )

    def copy_to(self, graph: fx.Graph, env: dict[fx.Node, fx.Node]) -> fx.Node:
        """Add a node like it to `graph`, its arguments as `env` has them."""
        args = fx.node.map_arg(self.args, env.__getitem__)
        kwargs = fx.node.map_arg(self.kwargs, env.__getitem__)
        copied = graph.create_node(self.op, self.target, args, kwargs, type_expr=self.node.type)
        copied.name = self.name
        copied.meta = dict(self.meta)
        return copied
