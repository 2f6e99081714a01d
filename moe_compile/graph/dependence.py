"""Dependences between nodes: data, and writes in place seen through aliases.

Contract
    Works on graphs that are not functional, like Dynamo's. Two tensors alias when the fake values
    the tracer stored share storage. A writer precedes every later reader of that memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable
from typing import Any, Final

import torch
import torch.fx as fx
from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors
from torch.utils import _pytree as pytree

from moe_compile.graph.inner_graphs import (
    CONSTANTS,
    KERNEL,
    bodies,
    is_higher_order,
    is_opaque,
    seeded_call,
)
from moe_compile.graph.memory import storages_of
from moe_compile.graph.observation import observed, written_by_schema
from moe_compile.graph.query import is_wait, value_of

IN_PLACE_OPERATORS: Final = frozenset(
    {
        operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
        operator.ifloordiv, operator.imod, operator.ipow, operator.iand, operator.ior,
        operator.ixor, operator.ilshift, operator.irshift, operator.imatmul, operator.iconcat,
    }
)  # fmt: skip


def written_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the arguments whose tensors `node` writes in place."""
    target: Any = node.target
    if node.op == "call_function" and isinstance(target, torch._ops.OpOverload):
        if is_wait(node):
            return ()  # declared as writing its input; it only makes the launched value readable
        return _nodes(written_by_schema(target, node.args, node.kwargs))
    if is_higher_order(node):
        return _written_by_operator(node, target.name())
    seen = observed(node)
    by_name = _written_by_name(node)
    return by_name if seen is None else tuple(dict.fromkeys((*by_name, *seen.written)))


def _written_by_name(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the arguments that a function or method writes, by the naming rules of torch."""
    if node.op == "call_method":
        name = str(node.target)
        writes = name == "__setitem__" or (name.endswith("_") and not name.startswith("_"))
        return _nodes(node.args[:1]) if writes else ()
    if node.op != "call_function":
        return ()
    if node.target in IN_PLACE_OPERATORS:
        return _nodes(node.args[:1])
    name = getattr(node.target, "__name__", "")
    is_operator = getattr(node.target, "__module__", "") == operator.add.__module__
    ends = name.endswith("_") and not name.startswith("_") and not is_operator
    if node.kwargs.get("inplace") or ends:
        return _nodes(node.args[:1])
    return _nodes([node.kwargs.get("out")])


def _written_by_operator(node: fx.Node, name: str) -> tuple[fx.Node, ...]:
    """Return the inputs that a higher-order operator writes; for a Triton kernel, by its stores."""
    if (seeded := seeded_call(node)) is not None:
        return _nodes(written_by_schema(*seeded))
    if "mutation" not in name:
        writes = is_opaque(node) or any(_writes_inputs(body.graph) for body in bodies(node))
        return _nodes([node.args, node.kwargs]) if writes else ()
    tensors = node.kwargs.get("kwargs")
    if name != "triton_kernel_wrapper_mutation" or not isinstance(tensors, dict):
        return _nodes([node.args, node.kwargs])
    values = {k: value_of(v) if isinstance(v, fx.Node) else v for k, v in tensors.items()}
    try:
        written = get_mutated_tensors(
            node.kwargs[KERNEL],
            node.kwargs[CONSTANTS],
            values,
            node.kwargs.get("tma_descriptor_metadata", {}),
        )
    except (AssertionError, KeyError):  # a kernel torch does not know: it may write anything
        written = list(tensors)
    return _nodes([tensors[key] for key in written])


def _writes_inputs(graph: fx.Graph) -> bool:
    inputs = {s for n in graph.find_nodes(op="placeholder") for s in storages(n)}
    written = [a for node in graph.nodes for a in written_arguments(node)]
    return any(not (memory := storages(a)) or memory & inputs for a in written)


def _nodes(arguments: Any) -> tuple[fx.Node, ...]:
    return tuple(a for a in pytree.tree_leaves(arguments) if isinstance(a, fx.Node))


def storages(node: fx.Node) -> frozenset[int]:
    """Return the identities of the storages of the tensors `node` produces.

    The tracer keeps no value of an element that it takes to read: it lies in the whole tensor.
    """
    value = value_of(node)
    if value is None and node.target is operator.getitem:
        return frozenset(s for whole in node.all_input_nodes[:1] for s in storages(whole))
    return storages_of(value)


class Dependence:
    """The dependences of one graph; stale once the graph is edited."""

    def __init__(self, graph: fx.Graph) -> None:
        """Read `graph`: one pass over its nodes, in order."""
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.writes = {
            node: frozenset(s for a in written for s in storages(a))
            for node in graph.nodes
            if (written := written_arguments(node))
        }
        self.written = frozenset().union(*self.writes.values())
        self._later: dict[fx.Node, list[fx.Node]] = {}
        self._earlier: dict[fx.Node, list[fx.Node]] = {}
        for writer, storage in self.writes.items():
            for node in graph.nodes:
                if self.position[node] > self.position[writer] and self.reads(node) & storage:
                    self._later.setdefault(writer, []).append(node)
                    self._earlier.setdefault(node, []).append(writer)

    def in_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Return `nodes` in graph order."""
        return sorted(nodes, key=self.position.__getitem__)

    def reads(self, node: fx.Node) -> frozenset[int]:
        """Return the storages of the tensors `node` takes as arguments."""
        return frozenset(s for a in node.all_input_nodes for s in storages(a))

    def writers(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that write the memory of the tensors `node` makes, in graph order."""
        mine = storages(node)
        return [writer for writer, written in self.writes.items() if written & mine]

    def is_filled_first(self, node: fx.Node) -> bool:
        """Whether all nodes that write the memory of `node` run before any other reads it.

        An example is zeros to which ones are added in place.
        """
        writers = self.writers(node)
        mine = frozenset().union(*(self.writes[writer] for writer in writers))
        last = max(map(self.position.__getitem__, writers), default=-1)
        before = (n for n, position in self.position.items() if position < last)
        return all(n in writers or not self.reads(n) & mine for n in before)

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that need `node`: its users, and later readers of memory it wrote."""
        return [*node.users, *self._later.get(node, ())]

    def needs(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes `node` needs: its inputs, and earlier writers of memory it reads."""
        return [*node.all_input_nodes, *self._earlier.get(node, ())]

    def below(self, starts: Iterable[fx.Node], stops: Container[fx.Node] = ()) -> set[fx.Node]:
        """Return `starts` and everything that depends on them, not looking beyond `stops`."""
        return _reach(starts, self.readers, stops)

    def above(self, starts: Iterable[fx.Node], stops: Container[fx.Node] = ()) -> set[fx.Node]:
        """Return `starts` and everything they depend on, not looking beyond `stops`."""
        return _reach(starts, self.needs, stops)


def _reach(
    starts: Iterable[fx.Node],
    edges: Callable[[fx.Node], Iterable[fx.Node]],
    stops: Container[fx.Node],
) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in stops:
            todo.extend(edges(node))
    return seen
