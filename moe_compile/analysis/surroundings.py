"""What the graph around a region reads of it, and what that forbids.

Contract
    A region with a `Surroundings` may be replayed just before its result: nothing outside reads
    rows from inside it, and no mode that its operators run under differs there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
import torch.fx as fx

from moe_compile.analysis.regions import MoERegion, Refusal, Refused
from moe_compile.graph.dependence import written_arguments
from moe_compile.graph.query import is_launch, is_wait, value_of

ASSERTIONS: Final = frozenset({torch.ops.aten._assert_scalar.default})
"""What Dynamo adds about sizes; assertions a user wrote are readers like any other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What stays of a region's body after it was replayed in chunks, and what goes with it."""

    stale_assertions: tuple[fx.Node, ...]
    """Assertions about values the region will not compute any more, with what only they read."""
    kept_reads: tuple[fx.Node, ...]
    """Host reads of the region whose values the graph outside needs, in graph order."""
    readers_of_kept: tuple[fx.Node, ...]
    """What stands before the region's result and depends on a kept read, in graph order."""


def examine_surroundings(region: MoERegion) -> Surroundings | Refused:
    """Return what to keep of `region`, or why it cannot be replayed at its result."""
    graph = region.result.graph
    inside = set(region.body)
    only_asserted = _only_asserted(graph)
    on_rows = set(region.row_side) - {region.result}
    for node in region.row_side:
        readers = [u for u in node.users if u not in inside and u not in only_asserted]
        if node in on_rows and readers:
            return _refuse(region, Refusal.ROWS_ESCAPE, f"{node.name} is read by {readers[0].name}")
    if (change := _state_change(region)) is not None:
        return _refuse(region, Refusal.STATE_CHANGES, change.name)

    escaping = [
        node
        for node in region.count_side
        if any(u not in inside and u not in only_asserted for u in node.users)
    ]
    alive = _closure(escaping, inside)
    reads = [n for n in region.count_side if n in alive and n.target == "item"]
    stale = _stale(graph, only_asserted, inside, alive)
    readers = _readers_before(region, reads, (inside - alive).union(stale))
    movable = all(_is_pure(n) for n in readers)
    return Surroundings(
        stale_assertions=tuple(stale),
        kept_reads=tuple(reads) if movable else (),
        readers_of_kept=tuple(readers) if movable else (),
    )


def _refuse(region: MoERegion, reason: Refusal, detail: str) -> Refused:
    return Refused(candidate=region.name, reason=reason, detail=detail)


def _only_asserted(graph: fx.Graph) -> set[fx.Node]:
    """Return assertions, and the nodes whose values end in assertions alone, or nowhere.

    The bodies of higher-order operators keep dead nodes: Dynamo cleans the top graph only.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node.target in ASSERTIONS:
            found.add(node)
        elif _is_pure(node) and (node.users or _is_dead(node)):
            found |= {node} if all(user in found for user in node.users) else set()
    return found


def _is_dead(node: fx.Node) -> bool:
    """Whether a pure node without readers only computes a value or asks for a size."""
    asks = node.target is operator.getitem or node.target in ("size", "numel", "dim")
    return asks or isinstance(value_of(node), torch.Tensor | torch.SymInt)


def _is_pure(node: fx.Node) -> bool:
    """Whether the node may run later: it neither writes, communicates nor changes a mode."""
    if node.op not in ("call_function", "call_method", "get_attr"):
        return False
    quiet = not (is_launch(node) or is_wait(node) or changes_state(node))
    return quiet and not written_arguments(node)


def _closure(starts: Iterable[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    """Return `starts` and the nodes of `inside` they depend on."""
    seen: set[fx.Node] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node in inside and node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return seen


def _readers_before(region: MoERegion, reads: list[fx.Node], dying: set[fx.Node]) -> list[fx.Node]:
    """Return what depends on `reads`, stands before the result and will live on."""
    reached = set(reads)
    found = []
    for node in region.result.graph.nodes:
        if node is region.result:
            break
        depends = node not in reached and any(i in reached for i in node.all_input_nodes)
        if depends and node not in dying:
            reached.add(node)
            found.append(node)
    return found


def _stale(
    graph: fx.Graph, only_asserted: set[fx.Node], inside: set[fx.Node], alive: set[fx.Node]
) -> list[fx.Node]:
    """Return assertion chains that depend on nodes of the body that will be erased."""
    stale: set[fx.Node] = set()
    for node in graph.nodes:
        if node in only_asserted and node not in inside:
            dead = (i in stale or (i in inside and i not in alive) for i in node.all_input_nodes)
            if any(dead):
                stale.add(node)
    return [node for node in graph.nodes if node in stale]


def changes_state(node: fx.Node) -> bool:
    """Whether the node switches a mode of the interpreter: grad mode, autocast and the like."""
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    return name.startswith(("_set_", "_enter_", "_exit_")) or name == "set_grad_enabled"


def _state_change(region: MoERegion) -> fx.Node | None:
    """Return a change of state that leaves some row operator under another mode than the result.

    Grad mode may be off and on again around operators of counts: those have no gradient.
    """
    on_rows = set(region.row_side)
    grad_mode: object = None
    seen_rows = False
    modes: set[object] = set()
    last_change = None
    for node in region.result.graph.nodes:
        if changes_state(node):
            last_change = node
            if "grad_enabled" in getattr(node.target, "__name__", ""):
                grad_mode = node.args[0]
            elif seen_rows:
                return node
        elif node in on_rows:
            seen_rows = True
            modes.add(grad_mode)
        if node is region.result:
            break
    return last_change if len(modes) > 1 else None
