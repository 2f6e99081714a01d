"""The order collectives launch in: one function of the graph's structure, the same on every rank.

Contract
    `plan_launch_order` reads dependences and positions only, never sizes, costs or ranks: graphs
    with the same dependences give the same order.
    Where ranks may have graphs of other dependences, as for no token or one, collectives keep the
    order of the user's program. Exempt are all-to-alls of one region with no other collective
    between them: their dependences are ours, and the same on every rank. Whether one region needs
    another is up to the user's program, and may differ by rank.
    The order extends the dependences, so some schedule keeps both.

Pseudo-code
    level(launch) = just below the lowest level that needs it; if none, just above its needs
    a reduction that no launch needs (gradients) goes one level later: it can wait
    a launch tied to no other stays at the level of the launch before it
    within a level: the launch whose input is ready first goes first, then graph order
    (kept) graph order; each run of all-to-alls of one region in the order found so, considering
    only the nodes between the first of them and the last
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.query import (
    group_name,
    is_all_to_all,
    is_launch,
    overload_name,
    tensor_of,
)

LAUNCH_RANK: Final = "megamoe_launch_rank"
"""Key in `node.meta` of a launch: its place in the planned order, for later verification."""
REGION: Final = "megamoe_region"
"""Key of a launch's region in `node.meta[ANNOTATIONS]`."""
ANNOTATIONS: Final = "custom"
"""Key in `node.meta` of notes that tracers carry to copies, and from forward to backward."""
REDUCTIONS: Final = ("::reduce_scatter", "::all_reduce")

Predecessors = Mapping[fx.Node, Sequence[fx.Node]]


def plan_launch_order(
    nodes: Iterable[fx.Node], predecessors: Predecessors, *, keeps_program: bool = False
) -> list[fx.Node]:
    """Return the launches among `nodes` (in graph order) in the order they are to run.

    With `keeps_program` only all-to-alls of one region pass one another, and no other collective.
    """
    nodes = list(nodes)
    if not keeps_program:
        return _by_level(nodes, predecessors)
    place = {node: i for i, node in enumerate(nodes)}
    runs = itertools.groupby(filter(is_launch, nodes), key=lambda n: _region(n) or n)
    order: list[fx.Node] = []
    for _, run in runs:
        launches = list(run)
        between = nodes[place[launches[0]] : place[launches[-1]] + 1]
        first = place[launches[0]]
        needed = {n: [p for p in predecessors[n] if place[p] >= first] for n in between}
        order += _by_level(between, needed)
    return order


def mark_region(launches: Iterable[fx.Node], region: str) -> None:
    """Note on `launches` that they are of `region`; nodes derived from them get the note too."""
    for launch in launches:
        known = launch.meta.get(ANNOTATIONS) or {}
        launch.meta[ANNOTATIONS] = {**known, REGION: region}


def _region(launch: fx.Node) -> tuple[str, str] | None:
    """Return the region of an all-to-all, and the group; None for other launches."""
    region = region_of(launch)
    return (group_name(launch), region) if region and is_all_to_all(launch) else None


def region_of(launch: fx.Node) -> str:
    """Return the region that a launch was marked as one of, "" where it was not."""
    return str((launch.meta.get(ANNOTATIONS) or {}).get(REGION, ""))


def _by_level(nodes: Sequence[fx.Node], predecessors: Predecessors) -> list[fx.Node]:
    levels = _launch_levels(nodes, predecessors)
    reach = _reach(nodes, predecessors, levels)
    by_level: dict[float, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        by_level[reach[node]].append(node)
    order: list[fx.Node] = []
    arrival: dict[fx.Node, int] = {}  # index in `order` of the last launch the node needs
    for level in sorted(by_level):
        launches = [n for n in by_level[level] if n in levels]
        for launch in launches:
            arrival[launch] = _latest(launch, predecessors, arrival)
        launches.sort(key=arrival.__getitem__)  # stable: graph order breaks ties
        for launch in launches:
            arrival[launch] = len(order)
            order.append(launch)
        for node in by_level[level]:
            if node not in levels:
                arrival[node] = _latest(node, predecessors, arrival)
    return order


def _latest(node: fx.Node, predecessors: Predecessors, arrival: Mapping[fx.Node, int]) -> int:
    return max((arrival[p] for p in predecessors[node]), default=-1)


def _launch_levels(nodes: Sequence[fx.Node], predecessors: Predecessors) -> dict[fx.Node, float]:
    depth: dict[fx.Node, int] = {}  # launches on the longest path that ends here
    for node in nodes:
        below = max((depth[p] for p in predecessors[node]), default=0)
        depth[node] = below + is_launch(node)
    ceiling: dict[fx.Node, float] = dict.fromkeys(nodes, math.inf)  # lowest level that needs it
    levels: dict[fx.Node, float] = {}
    sinks: set[fx.Node] = set()
    for node in reversed(nodes):
        if is_launch(node):
            if math.isinf(ceiling[node]):
                sinks.add(node)
                levels[node] = depth[node] - 1
            else:
                levels[node] = ceiling[node] - 1
            ceiling[node] = levels[node]
        for p in predecessors[node]:
            ceiling[p] = min(ceiling[p], ceiling[node])
    return _with_sinks_placed([n for n in nodes if n in levels], levels, depth, sinks)


def _with_sinks_placed(
    launches: list[fx.Node],
    levels: dict[fx.Node, float],
    depth: Mapping[fx.Node, int],
    sinks: set[fx.Node],
) -> dict[fx.Node, float]:
    previous = 0.0
    for launch in launches:
        if launch in sinks and depth[launch] == 1:
            levels[launch] = previous
        elif launch in sinks and any(r in overload_name(launch) for r in REDUCTIONS):
            levels[launch] += 1
        previous = levels[launch]
    return levels


def _reach(
    nodes: Sequence[fx.Node], predecessors: Predecessors, levels: Mapping[fx.Node, float]
) -> dict[fx.Node, float]:
    """Return the highest level of a launch each node depends on, itself included."""
    reach: dict[fx.Node, float] = {}
    for node in nodes:
        highest = max((reach[p] for p in predecessors[node]), default=-math.inf)
        reach[node] = levels.get(node, highest)
    return reach


def dependences(graph: fx.Graph) -> list[str]:
    """Return, for each launch, the launches its input comes from: one bit each, in hexadecimal.

    With these, other ranks' graphs have the same planned order, forward and backward.
    """
    needed: dict[fx.Node, int] = {}
    found: list[str] = []
    for node in graph.nodes:
        needed[node] = 0
        for p in node.all_input_nodes:
            needed[node] |= needed[p]
        if is_launch(node):
            found.append(f"{needed[node]:x}")
            needed[node] |= 1 << (len(found) - 1)
    return found


def record_launch_order(order: Iterable[fx.Node]) -> None:
    """Leave each launch's place in the planned order on the launch itself."""
    for rank, launch in enumerate(order):
        launch.meta[LAUNCH_RANK] = rank


def collective_order(graph: fx.Graph) -> dict[str, tuple[str, ...]]:
    """Return, per group, a signature of each collective in the order the graph launches them."""
    order: dict[str, list[str]] = {}
    for node in graph.nodes:
        if is_launch(node):
            order.setdefault(group_name(node), []).append(signature(node))
    return {group: tuple(order[group]) for group in sorted(order)}


def launch_numbers(graph: fx.Graph) -> dict[str, list[int]]:
    """Return, per group, the numbers of its launches among all of `graph`, counted from 1."""
    numbers: dict[str, list[int]] = {}
    for number, launch in enumerate(filter(is_launch, graph.nodes), 1):
        numbers.setdefault(group_name(launch), []).append(number)
    return numbers


def signature(launch: fx.Node) -> str:
    """Return name, operator, dtype and row length of the tensors sent; never their rows.

    The tracer numbers names in the order of the user's program, so that two exchanges of equal
    tensors are told apart.
    """
    sent = [t for a in launch.all_input_nodes if (t := tensor_of(a)) is not None]
    return f"{launch.name} = {overload_name(launch)}({', '.join(_row(t) for t in sent)})"


def _row(tensor: torch.Tensor) -> str:
    length = tensor.shape[-1] if tensor.dim() > 1 else 1
    return f"{str(tensor.dtype).removeprefix('torch.')}[{length if type(length) is int else '*'}]"
