"""Values of new nodes on a Dynamo graph, as the tracer would have stored them.

Contract
    Each node is run on the values stored of its inputs; nothing is computed. It requires a gradient
    where the node that it copies does. Integers that the host reads become new symbols.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from moe_compile.graph.inner_graphs import body_named
from moe_compile.graph.modes import changes_mode, modes, running_under
from moe_compile.graph.observation import call, running_on
from moe_compile.graph.query import has_gradient, value_of


def store_values(
    nodes: Sequence[fx.Node], fake: FakeTensorMode, original: Mapping[fx.Node, fx.Node]
) -> None:
    """Store the value of each of `nodes`, in graph order.

    `original` maps copies to their originals; other nodes require a gradient where an input does.
    """
    modes_of = modes(nodes[0].graph) if nodes else {}
    for node in nodes:
        if changes_mode(node):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), _given)
        with running_on(fake), running_under(modes_of[node]), torch.no_grad():
            value = call(node, args, kwargs)
            copied = original.get(node)
            flows = any(map(has_gradient, [copied] if copied else node.all_input_nodes))
            node.meta["example_value"] = _with_gradient(value) if flows else value


def _given(node: fx.Node) -> Any:
    if (body := body_named(node)) is not None:
        return body
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value_of(node))


def _with_gradient(value: Any) -> Any:
    def flows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.requires_grad_() if tensor.dtype.is_floating_point else tensor

    return pytree.tree_map_only(torch.Tensor, flows, value)
