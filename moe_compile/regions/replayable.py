"""Checks that a region's body may run later, once for each part of the rows.

Contract
    A region that passes communicates only by the exchanges of its rows, writes no tensor from
    outside, and is not read before its result. The graph is not edited.
    All forms of the counts that a rank sends hold the same numbers in the same flat order, unless
    one is written in place.
"""

from __future__ import annotations

from typing import Final

import torch.fx as fx

from moe_compile.graph.dependence import Dependence, storages
from moe_compile.graph.effects import is_host_arithmetic, is_pure, may_draw
from moe_compile.graph.query import (
    has_dynamic_splits,
    input_splits,
    is_integer,
    is_launch,
    operator_at,
    output_splits,
)
from moe_compile.journal.reasons import Left, Reason
from moe_compile.regions.regions import MoERegion

VALUE_KEEPING: Final = frozenset(
    {"to", "int", "long", "view", "reshape", "flatten", "contiguous", "clone", "detach", "alias"}
)
"""Methods that change the form of a tensor of counts, not its values or their flat order."""


def forms_of_counts(exchange: fx.Node) -> list[fx.Node]:
    """Return the counts as sent, and as they were before each change of form only."""
    node = exchange.args[0]
    assert isinstance(node, fx.Node)
    forms = [node]
    while (
        node.op == "call_method"
        and node.target in VALUE_KEEPING
        and isinstance(node.args[0], fx.Node)
        and is_integer(node.args[0])
    ):
        node = node.args[0]
        forms.append(node)
    return forms


def counted_by(forms: list[fx.Node], exchange: fx.Node) -> fx.Node:
    """Return the first node that takes the counts in another form, or sends them."""
    return forms[-2] if len(forms) > 1 else exchange


def fillers_of_counts(exchange: fx.Node, dependence: Dependence) -> set[fx.Node]:
    """Return the nodes that wrote the counts in place before they were read: `scatter_add_`."""
    forms = forms_of_counts(exchange)
    end, memory = dependence.position[counted_by(forms, exchange)], storages(forms[-1])
    return {
        writer
        for writer, written in dependence.writes.items()
        if written & memory and dependence.position[writer] < end
    }


def check_neighbours(region: MoERegion) -> Left | None:
    """Refuse a region if running its body later, on parts of the rows, would change the outside."""
    inside = set(region.body)
    splits = [*output_splits(region.dispatch), *input_splits(region.dispatch)]
    for size in splits:
        if isinstance(size, fx.Node) and size not in inside:
            return Left(Reason.NO_COUNT_EXCHANGE, operator_at(size))
    for node in region.between:
        if may_draw(node) or not (is_host_arithmetic(node) or is_pure(node)):
            return Left(Reason.ESCAPES, operator_at(node))
    for node in region.row_side:
        if node.op == "call_method" and node.target in ("item", "tolist"):
            return Left(Reason.HOST_READ_OF_ROWS, operator_at(node))
    return _check_launches(region) or _check_writes(region, inside)


def memory_of(region: MoERegion) -> frozenset[int]:
    """Return the storages that the body allocates and a copy of it allocates anew.

    Other nodes write them only after the body's reads: an earlier write would be in the body,
    which holds all nodes that its results need.
    """
    made = frozenset(s for node in region.body for s in storages(node))
    given = (*region.inputs, *region.others, *region.results)
    return made - frozenset(s for node in given for s in storages(node))


def _check_launches(region: MoERegion) -> Left | None:
    """Refuse other collectives than the exchanges of the rows, and rows sent on before the end."""
    for one in region.dispatched:
        beside = (o.result for o in region.dispatched if o is not one)
        others = region.facts.dependence.below(beside)
        if one.launch in others:
            return Left(Reason.COMMUNICATES, operator_at(one.launch))
    for node in region.body:
        if is_launch(node) and node not in region.launches:
            is_beside = node in region.count_side and has_dynamic_splits(node)
            reason = Reason.SPLIT_OTHERWISE if is_beside else Reason.COMMUNICATES
            return Left(reason, operator_at(node))
    return None


def _check_writes(region: MoERegion, inside: set[fx.Node]) -> Left | None:
    outside = frozenset(s for node in (*region.inputs, *region.others) for s in storages(node))
    for writer, written in region.facts.dependence.writes.items():
        if writer in inside and (written & outside or not written):
            return Left(Reason.MUTATES_OUTSIDE, operator_at(writer))
        if _rewrites_counts(writer, written, region):
            return Left(Reason.MUTATED_MEANWHILE, operator_at(writer))
    body = [node for node in region.body if node is not region.result]
    legality = region.facts.legality
    obstacle = legality.written_meanwhile(body, region.result, memory_of(region))
    if obstacle is not None:
        return Left(Reason.MUTATED_MEANWHILE, operator_at(obstacle.because_of))
    return None


def _rewrites_counts(writer: fx.Node, written: frozenset[int], region: MoERegion) -> bool:
    """Whether `writer` may make the counts that the region reads differ from those exchanged.

    They are equal only if nothing writes any form of them after the first change of form.
    """
    forms = forms_of_counts(region.count_exchange)
    place = region.facts.dependence.position
    if not place[counted_by(forms, region.count_exchange)] < place[writer] < place[region.result]:
        return False
    memory = frozenset(s for form in forms for s in storages(form))
    return not written or bool(written & memory)
