"""Find experts with a capacity between even exchanges, by data flow and named factors.

Contract
    Every even all-to-all is of a region, or meant to be of one and refused with a reason, or not
    spoken of: sequence, heads, parts of a batch and rows of a table travel by even exchanges too.
    It is meant to be of one where weights of its own stand against an index of what was received,
    in a batched product or in products one by one, and an even exchange back follows. Where sizes
    are symbols that is told by its form alone (unknown_sizes.py).
    The answer is a function of the graph's structure, the same on every rank.

Pseudo-code
    for each even all-to-all: back = the first even one below it, over the same group
        follow factors through all that stands between them, noting products with weights
        experts = a factor that weights share, or whose indices have weights of their own
        prove that experts stay apart, from what is sent to what comes back
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch.fx as fx

from moe_compile.attention.head_factors import Dims, Factor, Lost, flat, holds
from moe_compile.attention.head_proof import Refuse
from moe_compile.attention.head_tracking import is_even_exchange
from moe_compile.capacity.capacity_regions import CapacityRegion
from moe_compile.capacity.expert_proof import prove
from moe_compile.capacity.expert_rules import follow
from moe_compile.capacity.expert_tracking import ExpertTracker
from moe_compile.capacity.unknown_sizes import are_experts_of_unknown_size, is_weight
from moe_compile.graph.dependence import Dependence
from moe_compile.graph.query import group_name, is_integer, is_launch, operator_at, waits_on
from moe_compile.journal.reasons import Reason
from moe_compile.regions.regions import Refused


@dataclass(frozen=True, slots=True)
class CapacityFound:
    """What was found in one graph."""

    regions: tuple[CapacityRegion, ...] = ()
    """In graph order."""
    refused: tuple[Refused, ...] = ()
    """What was meant to be a region."""
    exchanges: frozenset[str] = frozenset()
    """Names of the exchanges of both."""


def find_capacity_regions(graph: fx.Graph, taken: Collection[fx.Node], first: int) -> CapacityFound:
    """Return the regions of a Dynamo graph and what was refused.

    `taken` are exchanges of other regions, `first` is the number of the first region.
    """
    exchanges = [n for n in graph.nodes if is_even_exchange(n) and n not in taken]
    if len(exchanges) < 2:
        return CapacityFound()
    dependence = Dependence(graph)
    regions: list[CapacityRegion] = []
    refused: list[Refused] = []
    used = set[fx.Node]()
    for dispatch in exchanges:
        back = None if dispatch in used else _back(dispatch, exchanges, used, dependence)
        if back is None or is_integer(dispatch):
            continue
        name = f"region {first + len(regions) + len(refused)}"
        found = _region(name, dispatch, back, dependence)
        if isinstance(found, CapacityRegion):
            regions.append(found)
        elif found is not None:
            refused.append(found)
        if found is not None:
            used |= {dispatch, back}
    return CapacityFound(tuple(regions), tuple(refused), frozenset(n.name for n in used))


def _back(
    dispatch: fx.Node,
    exchanges: Collection[fx.Node],
    used: Collection[fx.Node],
    dependence: Dependence,
) -> fx.Node | None:
    """Return the exchange that may bring back what `dispatch` sends."""
    below = dependence.below([dispatch]) - {dispatch}
    group = group_name(dispatch)
    return next(
        (n for n in exchanges if n in below and n not in used and group_name(n) == group), None
    )


def _region(
    name: str, dispatch: fx.Node, back: fx.Node, dependence: Dependence
) -> CapacityRegion | Refused | None:
    """Return the region between two exchanges, why it is refused, or None where it is none."""
    waits = waits_on(back)
    if not waits:
        return None
    result = waits[-1]
    between = dependence.below([dispatch]) & dependence.above([result], stops=[dispatch])
    body = dependence.in_order(between)
    tracker = ExpertTracker()
    try:
        _follow(tracker, body)
        experts = _experts(tracker)
        return prove(name, tracker, experts, body, dependence) if experts else None
    except Lost as lost:
        why, detail = Reason.EXPERTS_LOST, str(lost)
    except Refuse as refusal:
        why, detail = refusal.reason, refusal.detail
    rows = dispatch.all_input_nodes[0]
    is_meant = any(holds(dim, one) for one in _experts(tracker) for dim in _dims(tracker, rows))
    if not is_meant and are_experts_of_unknown_size(body):
        why, detail = Reason.CAPACITY_AT_RUN_TIME, ""
    elif not is_meant:
        return None
    return Refused(candidate=name, reason=why, detail=detail, is_region=True)


def _follow(tracker: ExpertTracker, body: list[fx.Node]) -> None:
    lost: Lost | None = None
    for node in body:
        if is_launch(node) and node is not body[0] and not is_even_exchange(node):
            raise Refuse(Reason.COMMUNICATES, operator_at(node))
        try:
            follow(tracker, node)
        except Lost as error:  # what is written further down tells what was meant
            lost = lost or error
    if lost is not None:
        raise lost


def _dims(tracker: ExpertTracker, node: fx.Node) -> Dims:
    return tracker.dims(node) if node in tracker else []


def _experts(tracker: ExpertTracker) -> list[Factor]:
    """Return the factors that may be the index of experts, the longest first."""
    found = dict.fromkeys([*_shared_by_weights(tracker), *_picked_for_weights(tracker)])
    return sorted(found, key=lambda factor: -factor.size)


def _shared_by_weights(tracker: ExpertTracker) -> Iterator[Factor]:
    for operand, factors in tracker.products:
        if len(flat(factors)) == 1 and is_weight(operand):
            yield flat(factors)[0]


def _picked_for_weights(tracker: ExpertTracker) -> Iterator[Factor]:
    """Yield factors of which each index has weights that no other has."""
    indices: dict[Factor, dict[fx.Node, set[int]]] = {}
    for product, operand in tracker.weights:
        for factor, index in tracker.picks(product).items() if is_weight(operand) else ():
            indices.setdefault(factor, {}).setdefault(operand, set()).add(index)
    for factor, by_weight in indices.items():
        own = {i for found in by_weight.values() for i in found if len(found) == 1}
        if len(own) > 1:
            yield factor
