"""Find experts that pick rows of gathered tokens in a form that runs in slices of tokens.

Contract
    Raises Refuse where it is in another form, or not proven; the graph is not edited.
    Recognised are sums that begin with zeros, to which each expert adds by `index_add` what it
    makes of the rows that it picks by the same index. How many rows that are, the host reads.
    The answer is a function of the graph's structure, the same on every rank.

Pseudo-code
    the puts: every index_add from the zeros to what is reduced, nothing else reads the sums
    for each put: the picks by its index, and all that is made of these
    prove that each row is made of its own row alone (picked_rows.py)
    all of it may run where the sums are reduced; nothing inside is read outside
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.fx as fx

from moe_compile.attention.head_proof import REFUSALS, Refuse
from moe_compile.graph.dependence import Dependence
from moe_compile.graph.gradient_order import find_later_reader
from moe_compile.graph.legality import Legality
from moe_compile.graph.query import (
    argument_of,
    called_name,
    group_name,
    has_gradient,
    is_integer,
    is_launch,
    known_rows,
    tensor_of,
    value_of,
    waits_on,
)
from moe_compile.graph.same_value import is_same_value
from moe_compile.journal.reasons import Reason
from moe_compile.picking.picked_rows import RowsOfExpert, num_rows_of, offsets_of, prove_rows
from moe_compile.picking.picking_regions import Picked, PickingRegion
from moe_compile.picking.routing_reads import behind_routing, num_host_reads
from moe_compile.picking.row_sums import otherwise, sums_of, tail_of
from moe_compile.regions.gathered_tokens import reduce_scatter_of
from moe_compile.regions.regions import Refused


@dataclass(frozen=True, slots=True)
class PickingFound:
    """What was found in one graph."""

    regions: tuple[PickingRegion, ...] = ()
    """In graph order."""
    refused: tuple[Refused, ...] = ()
    """What is in another form, or not proven: one for each reduction."""
    gathers: frozenset[str] = frozenset()
    """Names of the gathers of both; factors of rows are gathered beside the tokens."""


def find_picking_regions(graph: fx.Graph, others: Iterable[Refused], first: int) -> PickingFound:
    """Return the regions among `others` that gather tokens for experts, and what is refused.

    `first` is the number of the first region.
    """
    named = {other.candidate for other in others if other.reason is Reason.TOKENS_GATHERED}
    if not named:
        return PickingFound()
    dependence = Dependence(graph)
    launches = [node for node in graph.nodes if is_launch(node)]
    gathers: dict[fx.Node | None, list[fx.Node]] = {}
    for launch in launches:
        if launch.name in named:
            back = reduce_scatter_of(launch, launches, dependence)
            gathers.setdefault(back, []).append(launch)
    regions, refused = list[PickingRegion](), list[Refused]()
    for back, theirs in gathers.items():
        assert back is not None
        name = f"region {first + len(regions) + len(refused)}"
        found = _first_region(name, theirs, back, dependence)
        if isinstance(found, PickingRegion):
            regions.append(found)
        else:
            refused.append(found)
    return PickingFound(tuple(regions), tuple(refused), frozenset(named))


def _first_region(
    name: str, gathers: Iterable[fx.Node], back: fx.Node, dependence: Dependence
) -> PickingRegion | Refused:
    """Return the region of the first of `gathers` that has one, or the most telling refusal."""
    refused: list[Refused] = []
    for gather in gathers:
        try:
            return find_picking_region(name, gather, back, dependence)
        except Refuse as why:
            is_region = why.reason is not Reason.PICKED_OTHERWISE
            refused.append(
                Refused(
                    candidate=gather.name,
                    reason=why.reason,
                    detail=why.detail,
                    is_region=is_region,
                )
            )
    return max(refused, key=lambda one: one.is_region)


def find_picking_region(
    name: str, gather: fx.Node, back: fx.Node, dependence: Dependence
) -> PickingRegion:
    """Return the region from `gather` to the reduce-scatter `back`; raise Refuse."""
    if not waits_on(back):
        raise otherwise(f"nothing waits for {back.name}")
    everyone, result, tokens = waits_on(gather)[-1], waits_on(back)[-1], gather.all_input_nodes[0]
    num_tokens, num_all = known_rows(tokens), known_rows(everyone)
    if not num_tokens or not num_all or num_all % num_tokens:
        raise otherwise("the number of tokens is not known when compiling")
    tail = tail_of(back)
    zeros, puts = sums_of(tail, back)
    if known_rows(zeros) != num_all:
        raise otherwise(f"{zeros.name} has not one row for each token")
    experts = tuple(_expert(put, everyone, dependence) for put in puts)
    moved = (node for expert in experts for node in expert.body)
    body = dependence.in_order({zeros, *puts, *tail, *moved})
    _check_motion(experts, body, zeros, everyone, back, dependence)
    needed = [node for one in experts for node in (one.index, *one.by_row)]
    is_alone, dead = _dead(gather, body, back, dependence)
    return PickingRegion(
        name=name,
        tokens=tokens,
        gather=gather,
        everyone=everyone,
        zeros=zeros,
        experts=experts,
        tail=tuple(tail),
        reduce=back,
        result=result,
        is_alone=is_alone,
        dead=dead,
        behind_routing=behind_routing(gather, needed, dependence),
        num_host_reads=num_host_reads((one.index for one in experts), dependence),
        group=group_name(gather),
        num_ranks=num_all // num_tokens,
        num_tokens=num_tokens,
    )


def _dead(
    gather: fx.Node, body: list[fx.Node], back: fx.Node, dependence: Dependence
) -> tuple[bool, tuple[fx.Node, ...]]:
    """Return whether the experts alone read the gathered tokens, and what nothing needs then."""
    gathering = [gather, *waits_on(gather)]
    known = {*gathering, *body}
    is_alone = all(user in known for node in gathering for user in node.users)
    old = [*(gathering if is_alone else []), *body, back, *waits_on(back)]
    read_anew = {i for node in (*body, gather) for i in node.all_input_nodes} - {*old}
    legality = Legality(dependence, back.graph)
    dead = legality.unneeded(old, {waits_on(back)[-1]: None}, read_anew=read_anew)
    if (stays := next((node for node in old if node not in dead), None)) is not None:
        raise Refuse(Reason.ESCAPES, stays.name)
    return is_alone, tuple(dead)


def _expert(put: fx.Node, everyone: fx.Node, dependence: Dependence) -> Picked:
    """Return what `put` adds, followed up to where its rows are picked."""
    dim, index, rows = (argument_of(put, i, n) for i, n in enumerate(("dim", "index", "source"), 1))
    if dim != 0 or put.kwargs.keys() - {"dim", "index", "source"}:
        raise otherwise(f"{put.name} adds otherwise than row by row")
    if not (isinstance(index, fx.Node) and isinstance(rows, fx.Node) and is_integer(index)):
        raise otherwise(f"{put.name} adds no rows by an index")
    picks = [
        node
        for node in everyone.users
        if (by := _index_of(node, everyone)) is not None and is_same_value(by, index, dependence)
    ]
    if not picks or num_rows_of(index) is None:
        raise otherwise(
            f"{put.name} adds by an index that picks no rows, or as many whatever values say"
        )
    inside = dependence.below(picks) & dependence.above([rows], stops=picks)
    body = dependence.in_order(inside)
    for node in body:
        if (reader := next((u for u in node.users if u not in inside | {put}), None)) is not None:
            raise Refuse(Reason.ESCAPES, f"{node.name} is read by {reader.name}")
        if is_launch(node):
            raise Refuse(Reason.COMMUNICATES, node.name)
        if node in dependence.writes:
            raise Refuse(Reason.UNKNOWN_OPERATOR, f"{node.name} writes in place")
    return _classified(put, index, rows, picks, body)


def _index_of(node: fx.Node, everyone: fx.Node) -> fx.Node | None:
    """Return by what `node` picks rows of the tokens, None where it does not."""
    if called_name(node) == "getitem":
        index = node.args[1]
    elif called_name(node) == "index_select" and argument_of(node, 1, "dim") == 0:
        index = argument_of(node, 2, "index")
    else:
        return None
    is_plain = isinstance(index, fx.Node) and node.all_input_nodes == [everyone, index]
    return index if is_plain else None


def _classified(
    put: fx.Node, index: fx.Node, rows: fx.Node, picks: list[fx.Node], body: list[fx.Node]
) -> Picked:
    """Return the expert, with what it reads from outside by row and what it reads whole."""
    indices = {index, *(pick.all_input_nodes[1] for pick in picks)}
    num_rows = num_rows_of(index)
    by_row, offsets, weights = list[fx.Node](), list[fx.Node](), list[fx.Node]()
    read = (i for node in body if node not in picks for i in node.all_input_nodes if i not in body)
    for source in dict.fromkeys(read):
        tensor = tensor_of(source)
        if source in indices:
            raise Refuse(Reason.ROWS_MIXED, f"{source.name} is read as a number")
        if tensor is not None and tensor.dim() and num_rows_of(source) == num_rows:
            by_row.append(source)
        elif tensor is None and not isinstance(value_of(source), int | float | bool | None):
            raise Refuse(Reason.SIZE_FROM_COUNTS, source.name)
        elif all(offsets_of(node) is source for node in source.users if node in body):
            offsets.append(source)
        elif has_gradient(source):
            weights.append(source)
    return Picked(
        index=index,
        picks=tuple(node for node in body if node in picks),
        body=tuple(body),
        put=put,
        rows=rows,
        by_row=tuple(by_row),
        offsets=tuple(offsets),
        weights=tuple(weights),
    )


def _check_motion(
    experts: tuple[Picked, ...],
    body: list[fx.Node],
    zeros: fx.Node,
    everyone: fx.Node,
    back: fx.Node,
    dependence: Dependence,
) -> None:
    """Refuse what may not run where the sums are reduced, or makes a row of more than its own."""
    legality = Legality(dependence, back.graph)
    expert_of = {node: i for i, one in enumerate(experts) for node in (*one.body, one.put)}
    expert_of[zeros] = -1
    obstacle = legality.obstacle(body, back, lambda reader, _: expert_of.get(reader, len(experts)))
    if obstacle is not None:
        raise Refuse(REFUSALS[obstacle.hazard], str(obstacle))
    picks = [pick for expert in experts for pick in expert.picks]
    once = [(everyone, picks)]
    for expert in experts:
        once += [(s, [n for n in expert.body if s in n.all_input_nodes]) for s in expert.by_row]
    for source, readers in once:
        if (other := find_later_reader(readers, source, dependence)) is not None:
            raise Refuse(Reason.GRADIENT_ORDER, f"{source.name} is read by {other.name} too")
    for expert in experts:
        prove_rows(
            RowsOfExpert(
                index=expert.index,
                picks=expert.picks,
                by_row=expert.by_row,
                offsets=expert.offsets,
                body=expert.body,
                result=expert.rows,
            ),
            back,
        )
