"""Prove that experts stay apart from what is sent to them to what they send back.

Contract
    Raises Refuse or Lost where the proof fails; the graph is not edited.
    What a chunk computes of its experts, forward and backward, is then what the whole region
    computes of them, but for how kernels round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch.fx as fx

from moe_compile.attention.head_factors import Factor, Lost, flat, holds
from moe_compile.attention.head_inputs import read_from_outside
from moe_compile.attention.head_proof import REFUSALS, Refuse, check_escapes
from moe_compile.capacity.capacity_regions import CapacityRegion
from moe_compile.capacity.expert_tracking import ExpertTracker
from moe_compile.graph.dependence import Dependence
from moe_compile.graph.gradient_order import find_later_reader
from moe_compile.graph.legality import Legality
from moe_compile.graph.query import group_name, has_gradient, is_launch, operator_at, output_splits
from moe_compile.journal.reasons import Reason

WHOLE: Final = -1
"""Instead of an index: a value has all experts, in one dimension."""


def prove(
    name: str,
    tracker: ExpertTracker,
    candidates: Sequence[Factor],
    body: Sequence[fx.Node],
    dependence: Dependence,
) -> CapacityRegion:
    """Return the region of `body`, which `tracker` followed; raise where it is not proven."""
    dispatch, result = body[0], body[-1]
    launches = [node for node in body if is_launch(node)]
    if len(launches) > 2:
        raise Refuse(Reason.COMMUNICATES, operator_at(launches[1]))
    combine = launches[-1]
    rows = dispatch.all_input_nodes[0]
    experts = _travelling(tracker, candidates, rows, dispatch, combine, result)
    expert_of = _experts_of_values(tracker, experts, body)
    for node, dim in tracker.closed:
        if holds(dim, experts):
            raise Refuse(Reason.ROWS_MIXED, operator_at(node))
    region = CapacityRegion(
        name=name,
        rows=rows,
        dispatch=dispatch,
        combine=combine,
        result=result,
        body=tuple(body),
        cut=tuple(_inputs_to_cut(tracker, experts, expert_of, body, dependence)),
        tracker=tracker,
        experts=experts,
        expert_of={node: index for node, index in expert_of.items() if index != WHOLE},
        group=group_name(dispatch),
        num_ranks=len(output_splits(dispatch)),
    )
    check_escapes(body[:-1], body)
    _check_gradients(region, expert_of)
    legality = Legality(dependence, result.graph)
    if (obstacle := legality.obstacle(body[:-1], result)) is not None:
        raise Refuse(REFUSALS[obstacle.hazard], str(obstacle))
    return region


def _travelling(
    tracker: ExpertTracker,
    candidates: Sequence[Factor],
    rows: fx.Node,
    dispatch: fx.Node,
    combine: fx.Node,
    result: fx.Node,
) -> Factor:
    """Return the candidate that is in what is sent and in what comes back, beside the rank."""
    if flat(tracker.sent[combine]) != flat([tracker.source[dispatch]]):
        raise Lost(
            f"{operator_at(combine)} does not send back what {operator_at(dispatch)} brought"
        )
    for experts in candidates:
        places = [_num_places(tracker, node, experts) for node in (rows, result)]
        by_rank = any(holds(tracker.sent[launch], experts) for launch in (dispatch, combine))
        if flat([experts]) == [experts] and places == [1, 1] and not by_rank:
            return experts
    raise Lost("the index of the experts is not in what is sent and in what comes back")


def _num_places(tracker: ExpertTracker, node: fx.Node, experts: Factor) -> int:
    """Return in how many dimensions `node` has the index of experts; raises inside a join."""
    factors = [factor for dim in tracker.dims(node) for factor in dim]
    if any(f is not experts and holds([f], experts) for f in factors):
        raise Lost(f"{operator_at(node)} joins several experts with something else")
    return factors.count(experts)


def _experts_of_values(
    tracker: ExpertTracker, experts: Factor, body: Sequence[fx.Node]
) -> dict[fx.Node, int]:
    """Return which expert each value is of, `WHOLE` where all are in it."""
    found: dict[fx.Node, int] = {}
    for node in body:
        places, index = _num_places(tracker, node, experts), tracker.picks(node).get(experts)
        if places + (index is not None) != 1:
            raise Refuse(Reason.ROWS_MIXED, operator_at(node))
        found[node] = WHOLE if index is None else index
    return found


def _inputs_to_cut(
    tracker: ExpertTracker,
    experts: Factor,
    expert_of: dict[fx.Node, int],
    body: Sequence[fx.Node],
    dependence: Dependence,
) -> list[fx.Node]:
    """Return what has the index of experts of what `body` reads from outside.

    Refuses what experts share and has a gradient: chunks would add that up in another order.
    """
    found = []
    for source, by in read_from_outside(body).items():
        if _num_places(tracker, source, experts) == 0:
            indices = {expert_of[reader] for reader in by}
            if has_gradient(source) and (len(indices) > 1 or WHOLE in indices):
                raise Refuse(Reason.SHARED_PARAMETER, operator_at(source))
            continue
        if _num_places(tracker, source, experts) > 1:
            raise Lost(f"{operator_at(source)} has experts in several dimensions")
        if (other := find_later_reader(by, source, dependence)) is not None:
            raise Refuse(
                Reason.GRADIENT_ORDER, f"{operator_at(source)} is read by {operator_at(other)} too"
            )
        found.append(source)
    return found


def _check_gradients(region: CapacityRegion, expert_of: Mapping[fx.Node, int]) -> None:
    """Refuse a region of which a chunk would go without its exchanges in the backward pass."""
    if has_gradient(region.dispatch):
        lost = next((node for node in region.body if not has_gradient(node)), None)
        if lost is not None:
            raise Refuse(Reason.NO_GRADIENT, operator_at(lost))
    for node in region.body:
        parts = [i for i in node.all_input_nodes if expert_of.get(i, WHOLE) != WHOLE]
        if expert_of[node] == WHOLE and len({*map(has_gradient, parts)}) > 1:
            raise Refuse(Reason.NO_GRADIENT, operator_at(node))
