"""The order collectives launch in: a function of the graph's structure, the same on every rank.

Contract
    `plan_launch_order` reads dependences and positions only, never sizes, costs or ranks: graphs
    with the same dependences give the same order.
    Where ranks may have graphs of other dependences, as for no token or one, collectives keep the
    order of the user's program. Exempt are all-to-alls of one region with no other collective
    between them: their dependences are ours, and the same on every rank. Whether one region needs
    another is up to the user's program, and may differ by rank.
    The order extends the dependences, so some schedule keeps both.
    `order_by_parts` is the order of independent parts of a graph: one leg of each in turn. It reads
    dependences, operators and the kinds of tensors only: the same on every rank whose graph has the
    same dependences. It extends these. A part is a set of launches connected by data. A launch that
    no other depends on, such as a sum of gradients of several parts, is in none.

Pseudo-code
    level(launch) = just below the lowest level that needs it; if none, just above its needs
    a reduction that no launch needs (gradients) goes one level later: it can wait
    a launch tied to no other stays at the level of the launch before it
    within a level: the launch whose input is ready first goes first, then graph order
    (kept) graph order; each run of all-to-alls of one region in the order found so, considering
    only the nodes between the first of them and the last

Pseudo-code of the order by parts
    a leg begins with a product of rows that an exchange of rows brought: dispatch to experts,
        combine to sums; two hops are in one leg, with the exchanges in front of their rows
    sort launches by leg, then by part, in the order in which parts launch first, then as `by_level`
    in a leg the second hop of a part comes behind collectives of the next part's attention, and in
        front of the exchanges of that part: the rows of hop 1 are there only then
    of those that wait for no other, again and again, the first

By levels alone, all parts would come to an exchange before any launches it: the compute of one in
front of its exchange would hide nothing of another's.
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
    called_name,
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
PRODUCTS: Final = ("mm", "attention", "convolution", "matmul", "linear")
"""Parts of the names of operators that take long enough to compute under an exchange."""
BYTES: Final = (torch.uint8, torch.int8)


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


def order_by_parts(
    nodes: Sequence[fx.Node], predecessors: Predecessors, by_level: Sequence[fx.Node]
) -> list[fx.Node]:
    """Return the launches `by_level` (all those among `nodes`) one leg of each part in turn."""
    legs, second = _legs(nodes, predecessors)
    parts = _parts(nodes)
    numbers = {part: number for number, part in enumerate(sorted({*parts.values()}))}
    if len(numbers) < 2:
        return list(by_level)
    place = {launch: i for i, launch in enumerate(by_level)}

    def turn(launch: fx.Node) -> tuple[int, int, int, int]:
        number = numbers[parts[launch]] if launch in parts else len(nodes)
        if launch in second:
            return legs[launch], number + 1, 1, place[launch]
        return legs[launch], number, 2 * is_all_to_all(launch), place[launch]

    return _extended(sorted(by_level, key=turn), nodes, predecessors)


def products(graph: fx.Graph) -> list[str]:
    """Return each product of a Dynamo graph with the number of launches that it depends on.

    With these and `dependences`, other ranks' graphs have the same order of parts.
    """
    above: dict[fx.Node, frozenset[fx.Node]] = {}
    found: list[str] = []
    for node in graph.nodes:
        above[node] = frozenset[fx.Node]().union(*(above[n] for n in node.all_input_nodes))
        if any(name in called_name(node) for name in PRODUCTS):
            found.append(f"{called_name(node)} {len(above[node])}")
        if is_launch(node):
            above[node] |= {node}
    return found


def _extended(
    wished: Sequence[fx.Node], nodes: Sequence[fx.Node], predecessors: Predecessors
) -> list[fx.Node]:
    """Return the launches as `wished`, each behind those that must come before it.

    Of those whose turn it may be, the first wished comes first.
    """
    place = {launch: i for i, launch in enumerate(wished)}
    above: dict[fx.Node, int] = {}
    """Launches that must come before the node, or are it: a bit each, by `place`."""
    needs: list[int] = [0] * len(wished)
    for node in nodes:
        above[node] = 0
        for before in predecessors[node]:
            above[node] |= above[before]
        if node in place:
            needs[place[node]] = above[node]
            above[node] |= 1 << place[node]
    order: list[fx.Node] = []
    done, left = 0, [*range(len(wished))]
    while left:
        i = next(i for i in left if needs[i] & done == needs[i])
        left.remove(i)
        done |= 1 << i
        order.append(wished[i])
    return order


def _legs(
    nodes: Sequence[fx.Node], predecessors: Predecessors
) -> tuple[dict[fx.Node, int], set[fx.Node]]:
    """Return the leg of each launch (legs before it on the longest path), and the second hops."""
    second: set[fx.Node] = set()
    done: dict[fx.Node, int] = {}
    """Number of legs that are over in front of the node, or with it."""
    has_rows: dict[fx.Node, int] = {}
    """The leg whose rows the node has, or is computed from; -1 for none."""
    legs: dict[fx.Node, int] = {}
    least: dict[fx.Node, int] = {}
    for node in nodes:
        before = predecessors[node]
        done[node] = max((done[p] for p in before), default=0)
        has_rows[node] = max((has_rows[p] for p in node.all_input_nodes), default=-1)
        least[node] = max((least[p] for p in before), default=0)
        if is_launch(node):
            of_rows, has = _sends_rows(node), has_rows[node] == done[node]
            waits = has and not of_rows
            if has and of_rows:
                second.add(node)
            legs[node] = least[node] = max(least[node], done[node] + waits)
            if of_rows:
                has_rows[node] = max(has_rows[node], done[node])
        elif _is_product(node) and has_rows[node] == done[node]:
            done[node] += 1
    return legs, second


def _parts(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return, for launches that others depend on, the place of the first launch of their part."""
    needed = _needed_by_launches(nodes)
    place = {launch: i for i, launch in enumerate(filter(is_launch, nodes))}
    first: dict[int, int] = {i: i for i in place.values()}

    def find(i: int) -> int:
        while first[i] != i:
            i = first[i]
        return i

    nearest: dict[fx.Node, frozenset[int]] = {}
    """The last launches before each node, on any path."""
    for node in nodes:
        above = frozenset[int]().union(*(nearest[p] for p in node.all_input_nodes))
        if is_launch(node) and (node in needed or _sends_rows(node)):
            for other in above:
                one, two = sorted((find(place[node]), find(other)))
                first[two] = one
            above = frozenset({place[node]})
        nearest[node] = above
    return {n: find(i) for n, i in place.items() if n in needed or _sends_rows(n)}


def _needed_by_launches(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    for node in reversed(nodes):
        if node in needed or is_launch(node):
            needed.update(node.all_input_nodes)
    return {node for node in needed if is_launch(node)}


def _sends_rows(launch: fx.Node) -> bool:
    """Whether an all-to-all sends rows of numbers, and not counts, masks or scores."""
    if not is_all_to_all(launch):
        return False
    sent = tensor_of(launch.all_input_nodes[0])
    is_row = sent is not None and sent.dim() > 1
    return is_row and sent is not None and (sent.dtype.is_floating_point or sent.dtype in BYTES)


def _is_product(node: fx.Node) -> bool:
    return any(name in overload_name(node) for name in PRODUCTS)
