"""A second graph module equal to a Dynamo graph, for when the work of passes on it is given up.

Contract
    Parameters, buffers and constants are shared, not copied; operators, arguments, order, names
    and meta are the graph's as it was. Dynamo's attributes of module and inputs are kept.
    Bodies of higher-order operators are copied alike: passes edit these too.
"""

from __future__ import annotations

from typing import Final

import torch.fx as fx

ON_MODULE: Final = ("_param_name_to_source", "_source_to_user_stacks", "_backward_state")
ON_INPUT: Final = "_dynamo_source"


def copy_of_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Return the copy; later edits of `gm` do not reach it."""
    graph = fx.Graph(tracer_cls=gm.graph._tracer_cls)
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copied = graph.node_copy(node, env.__getitem__)
        copied.name = node.name
        if hasattr(node, ON_INPUT):
            setattr(copied, ON_INPUT, getattr(node, ON_INPUT))
        env[node] = copied
    copy = fx.GraphModule(gm, graph, class_name=type(gm).__name__)
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copy, name, copy_of_graph(child))
    copy.meta = dict(gm.meta)
    for name in ON_MODULE:
        if hasattr(gm, name):
            setattr(copy, name, getattr(gm, name))
    copy.train(gm.training)
    return copy
