"""The modes of the interpreter that the nodes of a Dynamo graph run under: gradients, autocast, ...

Contract
    A graph says where a mode is switched; what was in force before its first node is in force
    while it is compiled too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import torch
import torch.fx as fx

from moe_compile.graph.effects import (
    changes_autocast,
    changes_grad_mode,
    changes_mode,
    has_gradient,
)

Mode: TypeAlias = tuple[object, tuple[fx.Node, ...]]
"""Grad mode as last set, None for as it was at the start; every other switch still thrown."""


def modes(graph: fx.Graph) -> dict[fx.Node, Mode]:
    """Return the modes that every node runs under."""
    return dict(_modes(graph))


@contextmanager
def autocast_of(mode: Mode) -> Iterator[None]:
    """Run functions of torch under the autocast that `mode` has switched on."""
    with ExitStack() as stack:
        for switch in filter(changes_autocast, mode[1]):
            stack.enter_context(torch.autocast(*switch.args, **switch.kwargs))
        yield


def _modes(graph: fx.Graph) -> Iterator[tuple[fx.Node, Mode]]:
    """Yield every node with its modes."""
    grad_mode = _first_grad_mode(graph)
    thrown: tuple[fx.Node, ...] = ()
    for node in graph.nodes:
        yield node, (grad_mode, thrown)
        if changes_grad_mode(node):
            grad_mode = node.args[0] if node.args else None
        elif changes_mode(node):
            entered = next((i for i in node.all_input_nodes if i in thrown), None)
            if entered is not None and "exit" in getattr(node.target, "__name__", ""):
                thrown = tuple(n for n in thrown if n is not entered)
            else:
                thrown = (*thrown, node)


def _first_grad_mode(graph: fx.Graph) -> object:
    """Return True where a gradient is seen to flow before the first switch, else None: unknown."""
    for node in graph.nodes:
        if changes_grad_mode(node):
            return None
        if node.op not in ("placeholder", "get_attr") and has_gradient(node):
            return True
    return None
