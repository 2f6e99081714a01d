"""A graph as text for a reader: a line for each node, with the user's line that made it.

Contract
    One node is one line, `name: dtype[sizes] = operator(arguments)  # file.py:line in function`.
    A node that a pass leaves alone keeps its line, so that lines of two steps can be compared.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from moe_compile.graph.query import overload_name, source_place, value_of


def lines_of(graph: fx.Graph) -> tuple[str, ...]:
    """Return the lines of a graph, in order of its nodes."""
    return tuple(_line(node) for node in graph.nodes)


def _line(node: fx.Node) -> str:
    place = source_place(node)
    return f"{_said(node)}  # {place}" if place else _said(node)


def _said(node: fx.Node) -> str:
    made = f"{node.name}{_type(value_of(node))}"
    if node.op == "placeholder":
        return f"input {made}"
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    if node.op == "get_attr":
        return f"{made} = self.{node.target}"
    arguments = [_argument(one) for one in node.args]
    arguments += [f"{name}={_argument(value)}" for name, value in node.kwargs.items()]
    if node.op == "call_method":
        receiver, *others = arguments
        return f"{made} = {receiver}.{node.target}({', '.join(others)})"
    return f"{made} = {_operator(node)}({', '.join(arguments)})"


def _operator(node: fx.Node) -> str:
    if name := overload_name(node):
        return name.replace("::", ".")
    return str(getattr(node.target, "__name__", node.target))


def _argument(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]"
    return value.name if isinstance(value, fx.Node) else repr(value)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(map(str, value.shape))
        return f": {str(value.dtype).removeprefix('torch.')}[{sizes}]"
    return f": {value}" if isinstance(value, torch.SymInt) else ""
