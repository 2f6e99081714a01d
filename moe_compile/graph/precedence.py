"""Which nodes of a post-grad graph must come before which, whatever the schedule.

Contract
    Every edge goes from an earlier to a later node of the graph as it stands, so that the graph's
    own order is one of the orders allowed.
    Edges: data; writes in place against reads and writes of the same storage; random ops among
    themselves; nodes without users among themselves; copies into inputs after earlier waits; a
    sent tensor is not overwritten before its wait; and launches never cross a host read, nor an
    assertion: where it fails, every rank has launched the same collectives; nor what launches
    collectives of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.fx as fx

from moe_compile.graph.alias_classes import AliasClasses
from moe_compile.graph.dependence import written_arguments
from moe_compile.graph.effects import communicates, may_communicate, may_draw
from moe_compile.graph.query import is_launch, is_wait, overload_name, tensor_of
from moe_compile.ops.integers import INTEGERS

HOST_READ: Final = "aten::_local_scalar_dense"
"""Takes one integer; `megamoe::integers` takes several."""

RUNTIME_ASSERTIONS: Final = frozenset(
    {"aten::_assert_scalar", "aten::_assert_async", "aten::sym_constrain_range"}
)
"""What ends the program where a condition does not hold."""


def awaited(wait: fx.Node) -> fx.Node | None:
    """Return the launch `wait` waits for, through repeated waits, list items and views."""
    source: Any = wait.args[0]
    while isinstance(source, fx.Node) and not is_launch(source):
        if not (is_wait(source) or source.target is operator.getitem or is_view(source)):
            return None
        source = source.args[0]
    return source if isinstance(source, fx.Node) else None


def is_view(node: fx.Node) -> bool:
    """Whether the node only looks at its input: its schema says so."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and bool(target.is_view)


def is_host_read(node: fx.Node) -> bool:
    """Whether the host waits for a value of the device: reading a scalar, or a copy to the host."""
    if integers_taken(node):
        return True
    result = tensor_of(node)
    if result is None or result.device.type != "cpu" or node.op != "call_function":
        return False
    inputs = [t for a in node.all_input_nodes if (t := tensor_of(a)) is not None]
    return any(t.device.type not in ("cpu", "meta") for t in inputs) and not is_wait(node)


def integers_taken(node: fx.Node) -> int:
    """Return how many integers the host takes out of a tensor there: the one place to ask."""
    if node.target is INTEGERS:
        return len(node.meta["val"])
    return int(overload_name(node) == HOST_READ)


def find_predecessors(
    graph: fx.Graph, *, keeps_program: bool = False
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Return, for each node, the nodes that must come before it, in graph order.

    With `keeps_program` ranks may run other compute for as long: launches stay on their side of
    operators that may communicate without saying so.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    hazards = _Hazards.of(graph)
    chains = _Chains(keeps_program)
    return {
        node: tuple(
            sorted(
                {*node.all_input_nodes, *hazards.visit(node), *chains.visit(node)},
                key=position.__getitem__,
            )
        )
        for node in graph.nodes
    }


@dataclass(slots=True)
class _Hazards:
    """Reads and writes of the storages that some node of the graph writes in place."""

    classes: AliasClasses
    watched: frozenset[int]
    written: dict[fx.Node, frozenset[int]]
    last_writer: dict[int, fx.Node] = field(default_factory=dict)
    readers: dict[int, list[fx.Node]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: fx.Graph) -> _Hazards:
        classes = AliasClasses(graph.nodes)
        written = {
            node: classes.of(*arguments)
            for node in graph.nodes
            if (arguments := written_arguments(node))
        }
        for wait in graph.nodes:  # a launch that writes its input goes on writing until the wait
            if is_wait(wait) and (launch := awaited(wait)) in written and launch is not None:
                written[wait] = written[launch]
        watched = frozenset[int]().union(*written.values())
        return cls(classes=classes, watched=watched, written=written)

    def visit(self, node: fx.Node) -> Iterator[fx.Node]:
        if not self.watched or node.op in ("placeholder", "get_attr"):
            return
        writes = self.written.get(node, frozenset())
        for storage in self._touched(node) & self.watched:
            if storage in self.last_writer:
                yield self.last_writer[storage]
            if storage in writes:
                yield from self.readers.pop(storage, ())
                self.last_writer[storage] = node
            else:
                self.readers.setdefault(storage, []).append(node)

    def _touched(self, node: fx.Node) -> frozenset[int]:
        """Return the storages the node uses; a wait still uses what its launch sends."""
        launch = awaited(node) if is_wait(node) else None
        sent = () if launch is None else launch.all_input_nodes
        return self.classes.of(*node.all_input_nodes, *sent)


@dataclass(slots=True)
class _Chains:
    """Kinds of nodes that keep their order among themselves."""

    keeps_program: bool = False

    last: dict[str, fx.Node] = field(default_factory=dict)
    launches: list[fx.Node] = field(default_factory=list)
    """Since the last host read."""
    unasserted: list[fx.Node] = field(default_factory=list)
    """Launches since the last assertion."""
    waits: list[fx.Node] = field(default_factory=list)
    """Since the last copy into an input."""

    def visit(self, node: fx.Node) -> Iterator[fx.Node]:
        if node.op != "call_function":
            return
        if is_wait(node):
            self.waits.append(node)
        elif is_launch(node):
            self.launches.append(node)
            self.unasserted.append(node)
            yield from (self.last[k] for k in ("host read", "assertion") if k in self.last)
        else:
            yield from self._after_effects(node)
        yield from self._after_own_kind(node)

    def _after_effects(self, node: fx.Node) -> Iterator[fx.Node]:
        is_copy = _copies_into_input(node)
        if is_copy or not node.users:
            yield from self._link("effect", node)
        if is_copy:
            yield from self._drain(self.waits)

    def _after_own_kind(self, node: fx.Node) -> Iterator[fx.Node]:
        if may_draw(node):
            yield from self._link("random", node)
        hides_launches = may_communicate if self.keeps_program else communicates
        if is_host_read(node) or (hides_launches(node) and not (is_launch(node) or is_wait(node))):
            yield from self._link("host read", node)
            yield from self._drain(self.launches)
        if overload_name(node) in RUNTIME_ASSERTIONS:
            yield from self._link("assertion", node)
            yield from self._drain(self.unasserted)

    def _link(self, chain: str, node: fx.Node) -> Iterator[fx.Node]:
        if chain in self.last:
            yield self.last[chain]
        self.last[chain] = node

    def _drain(self, nodes: list[fx.Node]) -> Iterator[fx.Node]:
        yield from nodes
        nodes.clear()


def _copies_into_input(node: fx.Node) -> bool:
    target = node.args[0] if node.args else None
    return (
        overload_name(node) == "aten::copy_"
        and isinstance(target, fx.Node)
        and target.op == "placeholder"
    )
