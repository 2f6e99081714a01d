"""The order of nodes that every schedule of a post-grad graph must keep.

Contract
    Every edge goes from an earlier to a later node of the graph as it stands, so that the graph's
    own order is one of the orders allowed.
    Edges: data; writes in place against reads and writes of the same storage; random ops among
    themselves; nodes without users among themselves, except assertions about other numbers;
    copies into inputs after earlier waits; a sent tensor is not overwritten before its wait;
    launches never cross a node that launches collectives itself; and a launch stays behind the
    assertions that guard its sizes.

Why a host read needs no more than its data
    A read waits for earlier queued work, and that work for collectives launched before it.
    All ranks launch in one order. So the first collective that some rank has not launched is
    launched once those before it are over, wherever ranks read: no rank waits for ever.

Why an assertion needs no more, where ranks have the same graph
    Ranks on which it fails end with the same collectives launched: they run one order. A rank that
    fails alone leaves the others waiting in the next collective, as the program does. Sizes that
    the program refuses must not be sent: a launch stays behind an assertion about numbers where a
    symbol of theirs is among its sizes. Launches that one about a tensor guards are unknown: all
    stay behind it. Where two fail, either may be reported.
    Ranks with other graphs have other orders (`keeps_program`): there launches and assertions keep
    that of the program, or of ranks that fail alike one would wait for a launch of the other.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from moe_compile.graph.aliases import AliasClasses
from moe_compile.graph.dependence import written_arguments
from moe_compile.graph.effects import (
    communicates,
    is_host_arithmetic,
    may_communicate,
    may_draw,
)
from moe_compile.graph.query import (
    expression_of,
    is_copy,
    is_copy_wait,
    is_launch,
    is_wait,
    overload_name,
    starts_transfer,
    tensor_of,
    value_of,
)
from moe_compile.ops.integers import INTEGERS

HOST_READ: Final = "aten::_local_scalar_dense"
"""Operator that takes one integer; `megamoe::integers` takes several."""

RUNTIME_ASSERTIONS: Final = frozenset(
    {"aten::_assert_scalar", "aten::_assert_async", "aten::sym_constrain_range"}
)
"""Operators that end the program where a condition does not hold."""
NUMBERS: Final = (torch.SymInt, torch.SymBool, torch.SymFloat, bool, int, float)


def awaited(wait: fx.Node) -> fx.Node | None:
    """Return what `wait` waits for, through repeated waits, list items and views: a launch, or the
    start of a copy.
    """
    source: Any = wait.args[0]
    while isinstance(source, fx.Node) and not starts_transfer(source):
        if not (is_wait(source) or source.target is operator.getitem or is_view(source)):
            return None
        source = source.args[0]
    return source if isinstance(source, fx.Node) else None


def is_view(node: fx.Node) -> bool:
    """Whether the node only looks at its input: its schema says so."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and bool(target.is_view)


def is_host_read(node: fx.Node) -> bool:
    """Whether the host waits for a value of the device: reading a scalar, or a copy to the host.

    It does not wait for a copy that runs beside compute.
    """
    if integers_taken(node):
        return True
    if is_copy(node) or is_copy_wait(node):
        return False
    result = tensor_of(node)
    if result is None or result.device.type != "cpu" or node.op != "call_function":
        return False
    inputs = [t for a in node.all_input_nodes if (t := tensor_of(a)) is not None]
    return any(t.device.type not in ("cpu", "meta") for t in inputs) and not is_wait(node)


def integers_taken(node: fx.Node) -> int:
    """Return the number of integers that the host takes out of a tensor: the one place to ask."""
    if node.target is INTEGERS:
        return len(node.meta["val"])
    return int(overload_name(node) == HOST_READ)


def find_predecessors(
    graph: fx.Graph, *, keeps_program: bool = False
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Return, for each node, the nodes that must come before it, in graph order.

    With `keeps_program` ranks may have other graphs, and run other compute for as long: launches
    stay on their side of assertions, and of operators that may communicate without saying so.
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
        """Return the storages the node uses; a wait still uses the tensors its launch sends."""
        launch = awaited(node) if is_wait(node) else None
        sent = () if launch is None else launch.all_input_nodes
        return self.classes.of(*node.all_input_nodes, *sent)


@dataclass(slots=True)
class _Chains:
    """Kinds of nodes that keep their order among themselves, and nodes that stay on one side."""

    keeps_program: bool = False

    last: dict[str, fx.Node] = field(default_factory=dict)
    since: dict[str, list[fx.Node]] = field(default_factory=dict)
    """Chain -> the nodes since its last node that stay in front of the next."""
    guards: dict[Any, fx.Node] = field(default_factory=dict)
    """Symbol -> the last assertion about it; None -> the last that may be about anything."""

    def visit(self, node: fx.Node) -> Iterator[fx.Node]:
        if node.op != "call_function":
            return
        if is_wait(node):
            self.since.setdefault("copy", []).append(node)
        elif is_launch(node):
            yield from self._before_launch(node)
        elif overload_name(node) in RUNTIME_ASSERTIONS:
            yield from self._assert(node)
        else:
            yield from self._after_effects(node)
        yield from self._after_own_kind(node)

    def _before_launch(self, launch: fx.Node) -> Iterator[fx.Node]:
        yield from self._behind("inner launches", launch)
        if self.keeps_program:
            yield from self._behind("assertion", launch)
        if self.guards:
            yield from self._guards_of({None, *_symbols(launch, *launch.all_input_nodes)})

    def _assert(self, assertion: fx.Node) -> Iterator[fx.Node]:
        symbols = {None} if self.keeps_program else _guarded(assertion)
        if None in symbols:
            yield from self._link("effect", assertion)
            yield from self._link("assertion", assertion)
        else:
            yield from self._behind("effect", assertion)
            yield from self._guards_of(symbols)
        self.guards.update(dict.fromkeys(symbols, assertion))

    def _guards_of(self, symbols: set[Any]) -> Iterator[fx.Node]:
        yield from (self.guards[symbol] for symbol in symbols & self.guards.keys())

    def _after_effects(self, node: fx.Node) -> Iterator[fx.Node]:
        is_copy = _copies_into_input(node)
        if is_copy or not node.users:
            yield from self._link("effect", node)
        if is_copy:
            yield from self._link("copy", node)

    def _after_own_kind(self, node: fx.Node) -> Iterator[fx.Node]:
        if may_draw(node):
            yield from self._link("random", node)
        hides_launches = may_communicate if self.keeps_program else communicates
        if hides_launches(node) and not (is_launch(node) or is_wait(node)):
            yield from self._link("inner launches", node)

    def _link(self, chain: str, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes that `node`, of a chain, stands behind."""
        if chain in self.last:
            yield self.last[chain]
        self.last[chain] = node
        yield from self.since.pop(chain, ())

    def _behind(self, chain: str, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the last node of a chain; `node` stays in front of the next."""
        self.since.setdefault(chain, []).append(node)
        if chain in self.last:
            yield self.last[chain]


def _guarded(assertion: fx.Node) -> set[Any]:
    """Return the symbols that an assertion is about; None alone where that cannot be told.

    Returns those that the host reads, if there are any: the others are known before anything runs.
    If torch takes a condition as true once it is asserted, only its operands have symbols.
    """
    numbers, todo = set[fx.Node](), [*assertion.all_input_nodes]
    while todo:
        node = todo.pop()
        if not isinstance(value_of(node), NUMBERS):
            return {None}
        if node not in numbers:
            numbers.add(node)
            todo += (n for n in node.all_input_nodes if is_host_arithmetic(node))
    symbols = _symbols(*numbers)
    read = set[Any]().union(*map(free_unbacked_symbols, symbols))
    return read or (symbols if symbols or not numbers else {None})


def _symbols(*nodes: fx.Node) -> set[Any]:
    """Return the symbols in numbers and sizes that nodes make."""
    leaves = pytree.tree_leaves([value_of(node) for node in nodes])
    sizes = (n for v in leaves for n in (v.shape if isinstance(v, torch.Tensor) else (v,)))
    return {symbol for n in sizes for symbol in getattr(expression_of(n), "free_symbols", ())}


def _copies_into_input(node: fx.Node) -> bool:
    target = node.args[0] if node.args else None
    return (
        overload_name(node) == "aten::copy_"
        and isinstance(target, fx.Node)
        and target.op == "placeholder"
    )
