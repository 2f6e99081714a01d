"""A graph as it stands now: kept, to put it back; copied into a module of its own; as text.

Contract
    `restore` leaves the same Graph object with the operators, arguments, order, names and meta
    of the snapshot. Inputs and the output are the very nodes they were: Dynamo keeps attributes
    on them. All other node objects are new: analyses of before are stale.
    A snapshot is taken before every pass and used by few: it refers to arguments, which fx never
    changes in place, and copies no node.
    `copy_of_graph` makes a second graph module equal to a Dynamo graph, for when the work of passes
    on it is given up. Parameters, buffers and constants are shared, not copied; operators,
    arguments, order, names and meta are the graph's as it was. Dynamo's attributes of module and
    inputs are kept. Bodies of higher-order operators are copied alike: passes edit these too.
    As text, one node is one line,
    `name: dtype[sizes] = operator(arguments)  # file.py:line in function`, with the user's line
    that made it. A node that a pass leaves alone keeps its line, so that lines of two steps can be
    compared.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.fx as fx

from moe_compile.graph.query import overload_name, source_place, value_of

VALUES: Final = ("val", "example_value")
"""Keys in the meta of a node: its value by the tracer."""
ON_MODULE: Final = ("_param_name_to_source", "_source_to_user_stacks", "_backward_state")
ON_INPUT: Final = "_dynamo_source"


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
