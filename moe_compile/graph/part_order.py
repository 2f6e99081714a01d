"""The order in which collectives of independent parts of a graph launch: one leg of each in turn.

Contract
    Reads dependences, operators and the kinds of tensors only: the same on every rank whose graph
    has the same dependences. The order extends these.
    A part is a set of launches connected by data. A launch that no other depends on, such as a sum
    of gradients of several parts, is in none.

Pseudo-code
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

from collections.abc import Mapping, Sequence
from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.query import (
    called_name,
    is_all_to_all,
    is_launch,
    overload_name,
    tensor_of,
)

PRODUCTS: Final = ("mm", "attention", "convolution", "matmul", "linear")
"""Parts of the names of operators that take long enough to compute under an exchange."""
BYTES: Final = (torch.uint8, torch.int8)

Predecessors = Mapping[fx.Node, Sequence[fx.Node]]


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
