"""Build nodes in the middle of a graph.

Contract
    Every node an `Emitter` makes stands before its anchor, in the order of the calls, and carries
    the anchor's stack trace, so that errors name the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

CARRIED: Final = ("stack_trace", "nn_module_stack", "source_fn_stack")
"""Meta keys that tell where a node comes from; all others are facts about one value."""


class Emitter:
    """Appends nodes before `anchor`."""

    def __init__(self, anchor: fx.Node) -> None:
        """Emit before `anchor`, which stays."""
        self.anchor = anchor
        self.graph = anchor.graph

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of a function or operator."""
        with self.graph.inserting_before(self.anchor):
            return self._carry(self.graph.call_function(target, args, kwargs), self.anchor)

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of the tensor method `name`; the tensor is the first argument."""
        with self.graph.inserting_before(self.anchor):
            return self._carry(self.graph.call_method(name, args, kwargs), self.anchor)

    def copy(self, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
        """Emit `node` again, reading `env[input]` where env has the input."""
        with self.graph.inserting_before(self.anchor):
            copied = self.graph.node_copy(node, lambda n: env.get(n, n))
        copied.meta = {}
        return self._carry(copied, node)

    @staticmethod
    def _carry(node: fx.Node, source: fx.Node) -> fx.Node:
        node.meta.update({k: source.meta[k] for k in CARRIED if k in source.meta})
        return node


class ValuedEmitter(Emitter):
    """Appends nodes to a graph of AOTAutograd, each with the fake value that later passes read."""

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of a function or operator."""
        node = super().call(target, *args, **kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])
        return node


def recompute_between(source: fx.Node, results: Iterable[fx.Node]) -> None:
    """Have the backward pass compute again, not keep, what `results` are made of from `source`.

    The key is read by AOTAutograd's partitioner, as it is for activation checkpointing.
    """
    todo = list(results)
    while todo:
        node = todo.pop()
        if node is not source and "recompute" not in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            todo.extend(node.all_input_nodes)


def erase_unused(nodes: list[fx.Node]) -> int:
    """Erase those of `nodes` (in graph order) that nobody reads, last first; return how many."""
    erased = 0
    for node in reversed(nodes):
        if not node.users:
            node.graph.erase_node(node)
            erased += 1
    return erased
