"""Which collectives send one input of the program, and nothing else that needs a gradient.

Contract
    Says so of a Dynamo graph, before its backward is derived: of its nodes and of which of them
    need gradients, never of sizes. The gradient of such an input is what the collective's backward
    gives, or a function of it; that of any other goes on into the backward of other operators.
"""

from __future__ import annotations

import torch.fx as fx

from moe_compile.graph.query import has_gradient, is_launch


def send_one_input(graph: fx.Graph) -> list[bool]:
    """Return, for each launch, whether one input of the graph is all it has a gradient for."""
    return [_sends_one_input(node) for node in graph.nodes if is_launch(node)]


def _sends_one_input(launch: fx.Node) -> bool:
    node, sources = launch, [launch]
    while len(sources) == 1:
        (node,) = sources
        sources = [source for source in node.all_input_nodes if has_gradient(source)]
    return not sources and node.op in ("placeholder", "get_attr")
