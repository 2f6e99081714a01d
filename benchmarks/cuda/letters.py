"""The order of launches, waits, matrix products and attention of a graph, one letter each."""

from __future__ import annotations

import torch
import torch.fx as fx

from moe_compile.graph.inner_graphs import is_flex_attention, is_higher_order
from moe_compile.graph.precedence import awaited
from moe_compile.graph.query import is_launch, is_wait
from moe_compile.testing.wrapper_order import EventKind


def graph_letters(graph: fx.Graph) -> str:
    """Return the letters of `event_letters` for the nodes of an ATen graph.

    Not of a wait for what has landed already: a second one, which newer releases of Inductor leave
    out, or one for what another graph launched.
    """
    landed: set[fx.Node | None] = {None}
    letters = []
    for node in graph.nodes:
        launch = awaited(node) if is_wait(node) else None
        if not is_wait(node) or launch not in landed:
            letters.append(_letter(node))
        landed.add(launch)
    return "".join(letters)


def _letter(node: fx.Node) -> str:
    if is_launch(node):
        return EventKind.LAUNCH.value
    if is_wait(node):
        return EventKind.WAIT.value
    if is_flex_attention(node):
        return EventKind.ATTENTION.value
    name = str(node.target)
    if is_higher_order(node):  # the operator that it runs
        name = " ".join(str(a) for a in node.args if isinstance(a, torch._ops.OpOverload))
    if name.startswith(("aten.", "megamoe.")) and "mm." in name:
        return EventKind.GEMM.value
    if "dot_product" in name:
        return EventKind.ATTENTION.value
    return ""
