"""The neighbours of an attention operator: the next collectives, the choice of its backend.

Contract
    Questions about one graph, answered from its structure; nothing is edited.
"""

from __future__ import annotations

import torch.fx as fx

from moe_compile.dims.tracker import is_movement
from moe_compile.graph.modes import chooses_attention
from moe_compile.graph.query import is_all_gather, is_launch, overload_name


def nearest_launches(start: fx.Node, *, up: bool) -> list[fx.Node]:
    """Return the first launches met from `start` against or along the data flow."""
    seen: set[fx.Node] = set()
    found, todo = [], [start]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_launch(node):
            found.append(node)
        else:
            todo.extend(node.all_input_nodes if up else node.users)
    return found


def is_tensor_parallel(core: fx.Node) -> bool:
    """Whether the inputs of `core` come from a gather, and its result goes to a reduction."""
    is_gathered = any(map(is_all_gather, nearest_launches(core, up=True)))
    return is_gathered and any(
        "reduce" in overload_name(n) for n in nearest_launches(core, up=False)
    )


def backend_choices(core: fx.Node) -> tuple[fx.Node, ...]:
    """Return the selections of a backend on either side of `core`: entering and leaving."""
    nodes = list(core.graph.nodes)
    at = nodes.index(core)
    calls = [(i, n) for i, n in enumerate(nodes) if chooses_attention(n)]
    before, after = [n for i, n in calls if i < at], [n for i, n in calls if i > at]
    return (before[-1], after[0]) if before and after and len(before) % 2 else ()


def movements_above(operand: fx.Node) -> set[fx.Node]:
    """Return the movements of data above `operand`, and itself when it is one."""
    seen: set[fx.Node] = set()
    todo = [operand]
    while todo:
        node = todo.pop()
        if node not in seen and is_movement(node):
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return seen
