"""One graph as numbers for scheduling: precedences, costs, links, the order of launches.

Contract
    Nodes are indices in graph order. Every precedence goes from a lower to a higher index.
    A follower costs little and fuses with its reader: it is never scheduled by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch.fx as fx

from moe_compile.cost.amounts import is_elementwise, is_free
from moe_compile.cost.cost_model import Cost
from moe_compile.graph.effects import may_draw
from moe_compile.graph.launch_order import order_by_parts, plan_launch_order
from moe_compile.graph.precedence import awaited, find_predecessors, is_host_read
from moe_compile.graph.query import (
    ends_transfer,
    group_name,
    is_copy,
    is_copy_wait,
    is_launch,
    is_offload,
    is_wait,
)
from moe_compile.runtime.node_groups import link_of_group


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleProblem:
    """The scheduler's view of one graph; see the module docstring."""

    nodes: tuple[fx.Node, ...]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    compute_us: tuple[float, ...]
    link_us: tuple[float, ...]
    launches: tuple[int, ...]
    """Indices of launches, in the order they must run."""
    next_launch: Mapping[int, int]
    """Launch -> the launch that runs next; the one precedence that may go to a lower index."""
    group_of: Mapping[int, str]
    """Launch -> name of the process group whose link it takes: ranks of equal place take that of
    the group whose nodes they join."""
    awaits: Mapping[int, int | None]
    """Wait -> its launch; None when a graph input is waited for."""
    is_follower: tuple[bool, ...]
    urgency: tuple[float, ...]
    """Place of the earliest launch that needs the node; inf when none does."""
    path_us: tuple[float, ...]
    """Time of the longest path from the node to the end, links included."""
    first_result: tuple[int, ...]
    """Index of the first node that needs the node, or is it, and that only the output reads."""
    contention: float = 0.0
    """Share by which compute slows while a collective runs: the largest over the links."""
    overlap_slowdown: Mapping[str, float] = field(default_factory=dict)
    """Group -> share by which its collectives slow while compute runs."""
    host_us: tuple[float, ...]
    """Time of the host for each node."""
    reads: frozenset[int]
    """Nodes where the host waits for all work queued before."""
    copy_us: Mapping[int, float] = field(default_factory=dict)
    """Copy to the host, or back -> its time on the link to the host. Copies and their waits are
    followers: `place_copies` gives them their places in an order of the other nodes."""

    def successors(self, node: int) -> Iterator[int]:
        """Yield the nodes that must come after `node`: by precedence, and the next launch."""
        yield from self.after[node]
        if node in self.next_launch:
            yield self.next_launch[node]

    def is_kernel(self, node: int) -> bool:
        """Whether the host launches compute there, and neither reads nor launches a collective."""
        is_other = node in self.group_of or node in self.reads
        return not is_other and self.compute_us[node] > 0.0

    def num_missing(self) -> list[int]:
        """Return how many nodes must come before each node."""
        missing = [len(needed) for needed in self.before]
        for launch in self.next_launch.values():
            missing[launch] += 1
        return missing

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        costs: Mapping[fx.Node, Cost],
        *,
        keeps_program: bool = False,
        is_in_parts: bool = False,
    ) -> ScheduleProblem:
        """Read one graph; `keeps_program` as in `plan_launch_order`.

        Where it `is_in_parts` of its batch, and need not keep the program's order, parts launch in
        turn.
        """
        nodes = tuple(graph.nodes)
        index = {node: i for i, node in enumerate(nodes)}
        predecessors = find_predecessors(graph, keeps_program=keeps_program)
        before = tuple(tuple(index[p] for p in predecessors[n]) for n in nodes)
        after = _reversed(before)
        planned = plan_launch_order(nodes, predecessors, keeps_program=keeps_program)
        if is_in_parts and not keeps_program:
            planned = order_by_parts(nodes, predecessors, planned)
        launches = tuple(index[n] for n in planned)
        compute_us = tuple(costs[n].compute_us for n in nodes)
        link_us = tuple(costs[n].link_us for n in nodes)
        waits = {index[n]: awaited(n) for n in nodes if ends_transfer(n)}
        link_of = {n: link_of_group(group_name(n)) for n in planned}
        return cls(
            nodes=nodes,
            before=before,
            after=after,
            compute_us=compute_us,
            link_us=link_us,
            launches=launches,
            next_launch=dict(itertools.pairwise(launches)),
            group_of={i: link_of[nodes[i]] for i in launches},
            awaits={w: None if launch is None else index[launch] for w, launch in waits.items()},
            is_follower=_followers(nodes),
            urgency=_urgency(after, launches),
            path_us=_path_us(after, compute_us, link_us),
            first_result=_first_result(nodes, after),
            contention=max((costs[n].contention for n in planned), default=0.0),
            overlap_slowdown={link_of[n]: costs[n].overlap_slowdown for n in planned},
            host_us=tuple(costs[n].host_us for n in nodes),
            reads=frozenset(i for i, n in enumerate(nodes) if costs[n].waits_for_device),
            copy_us={index[n]: costs[n].copy_us for n in nodes if is_copy(n)},
        )


def _reversed(before: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    after: list[list[int]] = [[] for _ in before]
    for node, needed in enumerate(before):
        for p in needed:
            after[p].append(node)
    return tuple(map(tuple, after))


def _followers(nodes: Sequence[fx.Node]) -> tuple[bool, ...]:
    returned = {*nodes[-1].all_input_nodes, *(n.args[0] for n in nodes if is_offload(n))}
    return tuple(_is_follower(node, is_returned=node in returned) for node in nodes)


def _is_follower(node: fx.Node, *, is_returned: bool) -> bool:
    if node.op != "call_function" or not node.users:
        return False
    if is_copy(node) or is_copy_wait(node):
        return True
    if is_launch(node) or is_wait(node) or is_host_read(node) or may_draw(node):
        return False
    if is_free(node):
        return True
    is_constant = not node.all_input_nodes
    return (is_constant or is_elementwise(node)) and not is_returned


def _urgency(after: Sequence[Sequence[int]], launches: Sequence[int]) -> tuple[float, ...]:
    urgency = [math.inf] * len(after)
    for rank, launch in enumerate(launches):
        urgency[launch] = rank
    for node in reversed(range(len(after))):
        for successor in after[node]:
            urgency[node] = min(urgency[node], urgency[successor])
    return tuple(urgency)


def _path_us(
    after: Sequence[Sequence[int]], compute_us: Sequence[float], link_us: Sequence[float]
) -> tuple[float, ...]:
    path = [0.0] * len(after)
    for node in reversed(range(len(after))):
        below = max((path[s] for s in after[node]), default=0.0)
        path[node] = compute_us[node] + link_us[node] + below
    return tuple(path)


def _first_result(nodes: Sequence[fx.Node], after: Sequence[Sequence[int]]) -> tuple[int, ...]:
    result = [len(nodes)] * len(nodes)
    for node in reversed(range(len(nodes))):
        needed_by = (result[s] for s in after[node] if nodes[s].op != "output")
        result[node] = min(needed_by, default=node)
    return tuple(result)
