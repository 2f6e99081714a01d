"""Find experts with a capacity between even exchanges, by data flow and named factors.

Contract
    Every even all-to-all is of a region, or meant to be of one and refused with a reason, or not
    reported: sequences, heads, parts of a batch and rows of a table use even exchanges too.
    It is meant to be of one if each index of a received dimension has weights of its own, in a
    batched product or in products one by one, and an even exchange back follows. Where sizes
    are symbols only the form is looked at.
    The answer is a function of the graph's structure, the same on every rank.

Pseudo-code
    for each even all-to-all: back = the first even one below it, over the same group
        follow factors through all nodes between them, noting products with weights
        experts = a factor that weights share, or whose indices have weights of their own
        prove that experts stay apart, from the rows sent to the rows that come back

Between exchanges whose sizes are symbols, experts with a capacity are only recognised, not proven:
factors are followed where sizes are numbers. Experts have weights by index, in a batched product,
or each part of a concatenation has weights of its own, all of one shape, as in a loop over
experts.

The proof that experts stay apart, from the rows sent to them to the rows they send back, raises
Left or Lost where it fails; the graph is not edited. A chunk then computes for its experts,
forward and backward, the same as the whole region, except for the rounding of kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.fx as fx

from moe_compile.attention.head_proof import check_escapes, read_from_outside
from moe_compile.capacity.capacity_regions import CapacityRegion
from moe_compile.dims.arguments import joined, operator_name
from moe_compile.dims.factors import Dims, Factor, Lost, flat, holds
from moe_compile.dims.tracker import Tracker, is_even_exchange
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.gradient_order import find_later_reader
from moe_compile.graph.memory import tensors_in
from moe_compile.graph.query import (
    group_name,
    has_gradient,
    is_integer,
    is_launch,
    operator_at,
    output_splits,
    tensor_of,
    value_of,
    waits_on,
)
from moe_compile.journal.entries import Verdict
from moe_compile.journal.reasons import Left, Reason


@dataclass(frozen=True, slots=True)
class CapacityFound:
    """Regions and refusals found in one graph."""

    regions: tuple[CapacityRegion, ...] = ()
    """Regions in graph order."""
    refused: tuple[Verdict, ...] = ()
    """Refusals of candidates that were meant to be regions."""
    exchanges: frozenset[str] = frozenset()
    """Names of the exchanges of regions and refusals."""


def find_capacity_regions(
    facts: GraphFacts, taken: Collection[fx.Node], first: int
) -> CapacityFound:
    """Return the regions and the refusals of a Dynamo graph.

    `taken` are exchanges of other regions, `first` is the number of the first region.
    """
    exchanges = [n for n in facts.graph.nodes if is_even_exchange(n) and n not in taken]
    if len(exchanges) < 2:
        return CapacityFound()
    regions: list[CapacityRegion] = []
    refused: list[Verdict] = []
    used = set[fx.Node]()
    for dispatch in exchanges:
        below = facts.dependence.below([dispatch]) - {dispatch} - used
        back = None if dispatch in used else _back(dispatch, exchanges, below)
        if back is None or is_integer(dispatch):
            continue
        name = f"region {first + len(regions) + len(refused)}"
        found = _region(name, dispatch, back, facts)
        if isinstance(found, CapacityRegion):
            regions.append(found)
        elif found is not None:
            refused.append(found)
        if found is not None:
            used |= {dispatch, back}
    return CapacityFound(tuple(regions), tuple(refused), frozenset(n.name for n in used))


def _back(
    dispatch: fx.Node, exchanges: Collection[fx.Node], below: Collection[fx.Node]
) -> fx.Node | None:
    """Return the exchange that may bring back the rows of `dispatch`: the first `below` it."""
    group = group_name(dispatch)
    return next((n for n in exchanges if n in below and group_name(n) == group), None)


def _region(
    name: str, dispatch: fx.Node, back: fx.Node, facts: GraphFacts
) -> CapacityRegion | Verdict | None:
    """Return the region between two exchanges, why it is refused, or None where it is none."""
    waits = waits_on(back)
    if not waits:
        return None
    result, dependence = waits[-1], facts.dependence
    between = dependence.below([dispatch]) & dependence.above([result], stops=[dispatch])
    body = dependence.in_order(between)
    tracker, lost = Tracker(facts.modes), dict[fx.Node, Lost]()
    try:
        _follow(tracker, body, lost)
        experts = _experts(tracker)
        return prove(name, tracker, experts, body, facts) if experts else None
    except Lost as error:
        why, detail = Reason.EXPERTS_LOST, str(error)
    except Left as refusal:
        why, detail = refusal.reason, refusal.detail
    starts = (dispatch.all_input_nodes[0], *lost)
    received = [dim for node in starts for dim in _dims(tracker, node)]
    is_meant = any(holds(dim, one) for one in _experts(tracker) for dim in received)
    if not is_meant and are_experts_of_unknown_size(body):
        why, detail = Reason.CAPACITY_AT_RUN_TIME, ""
    elif not is_meant:
        return None
    return Verdict(candidate=name, reason=why, detail=detail, is_region=True)


def _follow(tracker: Tracker, body: list[fx.Node], lost: dict[fx.Node, Lost]) -> None:
    """Follow factors through `body`; note what is Lost in `lost`, then raise the first of it.

    Factors begin anew below a lost node: nodes there may show that a region was meant.
    """
    for node in body:
        if is_launch(node) and node is not body[0] and not is_even_exchange(node):
            raise Left(Reason.COMMUNICATES, operator_at(node))
        try:
            tracker.follow(node)
        except Lost as error:
            lost[node] = error
    if lost:
        raise next(iter(lost.values()))


def _dims(tracker: Tracker, node: fx.Node) -> Dims:
    return tracker.dims(node) if node in tracker else []


def _experts(tracker: Tracker) -> list[Factor]:
    """Return the factors that may be the index of experts, the longest first."""
    found = dict.fromkeys([*_shared_by_weights(tracker), *_picked_for_weights(tracker)])
    return sorted(found, key=lambda factor: -factor.size)


def _shared_by_weights(tracker: Tracker) -> Iterator[Factor]:
    for operand, factors in tracker.products:
        if len(flat(factors)) == 1 and is_weight(operand):
            yield flat(factors)[0]


def _picked_for_weights(tracker: Tracker) -> Iterator[Factor]:
    """Yield factors of which each index has weights that no other has."""
    indices: dict[Factor, dict[fx.Node, set[int]]] = {}
    for product, operand in tracker.weights:
        for factor, index in tracker.picks(product).items() if is_weight(operand) else ():
            indices.setdefault(factor, {}).setdefault(operand, set()).add(index)
    for factor, by_weight in indices.items():
        own = {i for found in by_weight.values() for i in found if len(found) == 1}
        if len(own) > 1:
            yield factor


BATCHED: Final = frozenset({"einsum", "matmul", "bmm", "baddbmm"})
PRODUCTS: Final = BATCHED | {"mm", "linear", "addmm"}
OF_ALL: Final = 3
"""Dimensions of weights of all experts."""

Weights = frozenset[fx.Node]


def are_experts_of_unknown_size(body: Sequence[fx.Node]) -> bool:
    """Whether `body`, in graph order, has a size that is no number, and weights of experts."""
    sizes = [s for n in body for t in tensors_in(value_of(n)) for s in t.shape]
    if all(isinstance(size, int) for size in sizes):
        return False
    above: dict[fx.Node, Weights] = {}
    for node in body:
        name = operator_name(node)
        own = _weights(node) if name in PRODUCTS else frozenset()
        if name in BATCHED and any(len(_shape(weight)) >= OF_ALL for weight in own):
            return True
        if name in ("cat", "stack") and _have_their_own([above.get(p) for p in joined(node)]):
            return True
        above[node] = own.union(*(above.get(i, frozenset()) for i in node.all_input_nodes))
    return False


def is_weight(operand: fx.Node) -> bool:
    """Whether `operand` is made of parameters alone."""
    todo, seen = [operand], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    given = [n for n in seen if not n.all_input_nodes]
    return all(n.op == "get_attr" or isinstance(value_of(n), torch.nn.Parameter) for n in given)


def _weights(product: fx.Node) -> Weights:
    return frozenset(i for i in product.all_input_nodes if len(_shape(i)) > 1 and is_weight(i))


def _have_their_own(parts: Sequence[Weights | None]) -> bool:
    """Whether each of several parts is made by weights that no other is, all of the same shapes."""
    known = [part for part in parts if part]
    if len(known) < len(parts) or len(parts) < 2:
        return False
    own = [part - frozenset().union(*(p for p in known if p is not part)) for part in known]
    shapes = {tuple(sorted(map(str, map(_shape, weights)))) for weights in own}
    return all(own) and len(shapes) == 1


def _shape(node: fx.Node) -> tuple[object, ...]:
    tensor = tensor_of(node)
    return () if tensor is None else tuple(tensor.shape)


WHOLE: Final = -1
"""Stands for an index where a value has all experts, in one dimension."""


def prove(
    name: str,
    tracker: Tracker,
    candidates: Sequence[Factor],
    body: Sequence[fx.Node],
    facts: GraphFacts,
) -> CapacityRegion:
    """Return the region of `body`, which `tracker` followed; raise where it is not proven."""
    dispatch, result = body[0], body[-1]
    launches = [node for node in body if is_launch(node)]
    if len(launches) > 2:
        raise Left(Reason.COMMUNICATES, operator_at(launches[1]))
    combine = launches[-1]
    rows = dispatch.all_input_nodes[0]
    experts = _travelling(tracker, candidates, rows, dispatch, combine, result)
    expert_of = _experts_of_values(tracker, experts, body)
    for node, dim in tracker.closed:
        if holds(dim, experts):
            raise Left(Reason.ROWS_MIXED, operator_at(node))
    region = CapacityRegion(
        name=name,
        rows=rows,
        dispatch=dispatch,
        combine=combine,
        result=result,
        body=tuple(body),
        cut=tuple(_inputs_to_cut(tracker, experts, expert_of, body, facts)),
        tracker=tracker,
        experts=experts,
        expert_of={node: index for node, index in expert_of.items() if index != WHOLE},
        group=group_name(dispatch),
        num_ranks=len(output_splits(dispatch)),
    )
    check_escapes(body[:-1], body)
    _check_gradients(region, expert_of)
    if (obstacle := facts.legality.obstacle(body[:-1], result)) is not None:
        raise obstacle.left
    return region


def _travelling(
    tracker: Tracker,
    candidates: Sequence[Factor],
    rows: fx.Node,
    dispatch: fx.Node,
    combine: fx.Node,
    result: fx.Node,
) -> Factor:
    """Return the candidate that rows have when sent and when back, apart from the rank."""
    if flat(tracker.sent[combine]) != flat([tracker.source[dispatch]]):
        raise Lost(
            f"{operator_at(combine)} must send back the rows that {operator_at(dispatch)} "
            "brought, and does not"
        )
    for experts in candidates:
        places = [_num_places(tracker, node, experts) for node in (rows, result)]
        by_rank = any(holds(tracker.sent[launch], experts) for launch in (dispatch, combine))
        if flat([experts]) == [experts] and places == [1, 1] and not by_rank:
            return experts
    raise Lost(
        "the tensor that is sent and the tensor that comes back must both have a dimension of "
        "experts, and one has none"
    )


def _num_places(tracker: Tracker, node: fx.Node, experts: Factor) -> int:
    """Return the number of dimensions of `node` with the index of experts; raises inside a join."""
    factors = [factor for dim in tracker.dims(node) for factor in dim]
    if any(f is not experts and holds([f], experts) for f in factors):
        raise Lost(
            f"{operator_at(node)} joins entries of several experts with other entries, so "
            "experts cannot run chunk by chunk"
        )
    return factors.count(experts)


def _experts_of_values(
    tracker: Tracker, experts: Factor, body: Sequence[fx.Node]
) -> dict[fx.Node, int]:
    """Return the expert of each value, `WHOLE` for a value that has all of them."""
    found: dict[fx.Node, int] = {}
    for node in body:
        places, index = _num_places(tracker, node, experts), tracker.picks(node).get(experts)
        if places + (index is not None) != 1:
            raise Left(Reason.ROWS_MIXED, operator_at(node))
        found[node] = WHOLE if index is None else index
    return found


def _inputs_to_cut(
    tracker: Tracker,
    experts: Factor,
    expert_of: dict[fx.Node, int],
    body: Sequence[fx.Node],
    facts: GraphFacts,
) -> list[fx.Node]:
    """Return the inputs of `body` from outside that have the index of experts.

    Refuses a shared input with a gradient: chunks would add that up in another order.
    """
    found = []
    for source, by in read_from_outside(body).items():
        if _num_places(tracker, source, experts) == 0:
            indices = {expert_of[reader] for reader in by}
            if has_gradient(source) and (len(indices) > 1 or WHOLE in indices):
                raise Left(Reason.SHARED_PARAMETER, operator_at(source))
            continue
        if _num_places(tracker, source, experts) > 1:
            raise Lost(
                f"{operator_at(source)} has experts in several dimensions, but must have "
                "them in one"
            )
        if (other := find_later_reader(by, source, facts.dependence)) is not None:
            raise Left(
                Reason.GRADIENT_ORDER, f"{operator_at(source)} is also read by {operator_at(other)}"
            )
        found.append(source)
    return found


def _check_gradients(region: CapacityRegion, expert_of: Mapping[fx.Node, int]) -> None:
    """Refuse a region of which a chunk would lack its exchanges in the backward pass."""
    if has_gradient(region.dispatch):
        lost = next((node for node in region.body if not has_gradient(node)), None)
        if lost is not None:
            raise Left(Reason.NO_GRADIENT, operator_at(lost))
    for node in region.body:
        parts = [i for i in node.all_input_nodes if expert_of.get(i, WHOLE) != WHOLE]
        if expert_of[node] == WHOLE and len({*map(has_gradient, parts)}) > 1:
            raise Left(Reason.NO_GRADIENT, operator_at(node))
