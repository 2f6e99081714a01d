"""Find experts that pick rows of gathered tokens in a form that runs in slices of tokens.

Contract
    Raises Refuse where it is in another form, or not proven; the graph is not edited.
    Recognised are sums that begin with zeros, to which each expert adds what it makes of the rows
    that it picks by the same index, or mask. How many rows that are, the host reads.
    The answer is a function of the graph's structure, the same on every rank.

Pseudo-code
    the puts: every addition from the zeros to what is reduced, nothing else reads the sums
    for each put: the picks by its index, and all that is made of these
    prove that each row is made of its own row alone (picked_rows.py)
    all of it may run where the sums are reduced; nothing inside is read outside
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch.fx as fx

from moe_compile.attention.head_proof import REFUSALS, Refuse
from moe_compile.graph.dependence import Dependence
from moe_compile.graph.gradient_order import find_later_reader
from moe_compile.graph.legality import Legality
from moe_compile.graph.query import (
    group_name,
    has_gradient,
    is_assertion,
    is_launch,
    known_rows,
    operator_at,
    tensor_of,
    value_of,
    waits_on,
)
from moe_compile.graph.same_value import is_same_value
from moe_compile.journal.reasons import Reason
from moe_compile.picking.picked_rows import RowsOfExpert, offsets_of, prove_rows
from moe_compile.picking.picking_regions import Picked, PickingRegion
from moe_compile.picking.routing_reads import behind_routing, num_host_reads
from moe_compile.picking.row_index import RowIndex, index_of, is_mask, num_rows_of
from moe_compile.picking.row_sums import Put, otherwise, sums_of, tail_of
from moe_compile.picking.size_checks import readers_of, size_checks
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
    zeros, puts = sums_of(tail, back, dependence)
    if known_rows(zeros) != num_all:
        raise otherwise(f"{zeros.name} has not one row for each token")
    experts = tuple(_expert(put, everyone, dependence) for put in puts)
    moved = (node for expert in experts for node in expert.moved)
    body = dependence.in_order({zeros, *tail, *moved})
    experts = _proven(experts, body, zeros, everyone, back, dependence)
    needed = [node for one in experts for node in (one.index, *one.by_row)]
    written = [*needed, *(n for one in experts for n in (*one.picks, *one.put.nodes))]
    num_searches = sum(is_mask(one.index) for one in experts)
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
        num_host_reads=num_host_reads(written, dependence),
        num_reads_in_slices=num_host_reads(needed, dependence) + num_searches + 1,
        group=group_name(gather),
        num_ranks=num_all // num_tokens,
        num_tokens=num_tokens,
    )


def _dead(
    gather: fx.Node, body: list[fx.Node], back: fx.Node, dependence: Dependence
) -> tuple[bool, tuple[fx.Node, ...]]:
    """Return whether the experts alone read the gathered tokens, and what nothing needs then."""
    gathering = [gather, *waits_on(gather)]
    checks = size_checks(body)
    known = {*gathering, *body}
    is_alone = all(user in known for node in gathering for user in node.users)
    old = [*(gathering if is_alone else []), *body, *checks, back, *waits_on(back)]
    read_anew = {i for node in (*body, gather) for i in node.all_input_nodes} - {*old}
    legality = Legality(dependence, back.graph)
    dropped = {*filter(is_assertion, checks)}
    replaced: dict[fx.Node, fx.Node | None] = {waits_on(back)[-1]: None}
    dead = legality.unneeded(old, replaced, dropped, read_anew)
    if (stays := next((node for node in old if node not in dead), None)) is not None:
        raise Refuse(Reason.ESCAPES, operator_at(stays))
    return is_alone, tuple(dead)


def _expert(put: Put, everyone: fx.Node, dependence: Dependence) -> Picked:
    """Return what `put` adds, followed up to where its rows are picked."""
    index, name = put.indices[0], put.nodes[-1].name
    picks = {
        node: by
        for node in everyone.users
        if (by := index_of(node)) is not None
        and node.all_input_nodes == [everyone, by.index]
        and is_same_value(by.index, index, dependence)
    }
    counted = {num_rows_of(node, by.dim) for node, by in picks.items()}
    if len(counted) != 1 or None in counted:
        raise otherwise(
            f"{name} adds by an index that picks no rows, or as many whatever values say"
        )
    inside = dependence.below(picks) & dependence.above([put.rows], stops=picks)
    if put.rows not in inside:
        raise otherwise(f"{name} adds what is not made of the rows that its index picks")
    body = dependence.in_order(inside)
    for node in body:
        reader = next((u for u in readers_of(node) if u not in {*inside, *put.nodes}), None)
        if reader is not None:
            raise Refuse(Reason.ESCAPES, f"{operator_at(node)} is read by {operator_at(reader)}")
        if is_launch(node):
            raise Refuse(Reason.COMMUNICATES, operator_at(node))
        if node in dependence.writes:
            raise Refuse(Reason.UNKNOWN_OPERATOR, f"{operator_at(node)} writes in place")
    return _classified(put, picks, body)


def _classified(put: Put, picks: dict[fx.Node, RowIndex], body: list[fx.Node]) -> Picked:
    """Return the expert, with what it reads from outside by row and what it reads whole."""
    indices = (*put.indices, *(by.index for by in picks.values()))
    (num_rows,) = {num_rows_of(node, by.dim) for node, by in picks.items()}
    by_row, offsets, weights = list[fx.Node](), list[fx.Node](), list[fx.Node]()
    read = (i for node in body if node not in picks for i in node.all_input_nodes if i not in body)
    for source in dict.fromkeys(read):
        tensor = tensor_of(source)
        if source in indices:
            raise Refuse(Reason.ROWS_MIXED, f"{operator_at(source)} is read as a number")
        if tensor is not None and tensor.dim() and num_rows_of(source) == num_rows:
            by_row.append(source)
        elif tensor is None and not isinstance(value_of(source), int | float | bool | None):
            raise Refuse(Reason.SIZE_FROM_COUNTS, operator_at(source))
        elif all(offsets_of(node) is source for node in source.users if node in body):
            offsets.append(source)
        elif has_gradient(source):
            weights.append(source)
    return Picked(
        index=indices[0],
        indices=indices,
        picks=tuple(node for node in body if node in picks),
        body=tuple(body),
        put=put,
        by_row=tuple(by_row),
        offsets=tuple(offsets),
        weights=tuple(weights),
        row_dims={node: by.dim for node, by in picks.items()},
    )


def _proven(
    experts: tuple[Picked, ...],
    body: list[fx.Node],
    zeros: fx.Node,
    everyone: fx.Node,
    back: fx.Node,
    dependence: Dependence,
) -> tuple[Picked, ...]:
    """Return the experts with the dimensions of their rows.

    Refuses what may not run where the sums are reduced, or makes a row of more than its own.
    """
    legality = Legality(dependence, back.graph)
    expert_of = {node: i for i, one in enumerate(experts) for node in one.moved}
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
            raise Refuse(
                Reason.GRADIENT_ORDER, f"{operator_at(source)} is read by {operator_at(other)} too"
            )
    proven = []
    for expert in experts:
        dims = prove_rows(
            RowsOfExpert(
                picks=expert.row_dims,
                by_row=expert.by_row,
                offsets=expert.offsets,
                weights=expert.weights,
                body=expert.body,
                result=expert.put.rows,
            ),
            back,
        )
        proven.append(replace(expert, row_dims=dims))
    return tuple(proven)
