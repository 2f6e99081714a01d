"""Find MoE regions by data flow alone: no names, no annotations.

Contract
    Every launch of the graph ends in a region or gets a refusal; the graph is not edited.
    The answer is a function of the graph's structure, the same on every rank.

Pseudo-code
    for each all-to-all with split sizes known only at run time (a dispatch):
        combine = the first all-to-all below it, same group, the two split lists swapped
        beside them: what is split alike and travels with the rows (payloads.py)
        count exchange = the nearest exchange of integers above the split sizes
        body = what depends on counts or a dispatch, and a combine depends on
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.fx as fx

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.query import (
    group_name,
    has_dynamic_splits,
    input_splits,
    is_all_gather,
    is_all_to_all,
    is_integer,
    is_launch,
    number_of,
    operator_at,
    output_splits,
    source_place,
    tensor_of,
    waits_on,
)
from moe_compile.journal.reasons import Reason
from moe_compile.regions.gathered_tokens import reduce_scatter_of
from moe_compile.regions.payloads import Payloads, find_payloads, is_combine_of
from moe_compile.regions.regions import MoERegion, Refused, exchanges
from moe_compile.regions.replayable import check_surroundings
from moe_compile.regions.sent_counts import fillers_of_counts, forms_of_counts


def find_moe_regions(graph: fx.Graph) -> tuple[list[MoERegion], list[Refused]]:
    """Return the regions of a Dynamo graph in graph order, and a refusal per other launch."""
    dependence = Dependence(graph)
    launches = [node for node in graph.nodes if is_launch(node)]
    regions: list[MoERegion] = []
    refused: dict[fx.Node, Refused] = {}
    matched: dict[fx.Node, _Match] = {}
    used: set[fx.Node] = set()
    for launch in launches:
        if launch in used:
            continue
        pair = _match(launch, launches, used, dependence)
        if isinstance(pair, Refused):
            refused[launch] = pair
            continue
        used |= {pair.count_exchange, *pair.payloads.dispatches, *pair.payloads.combines}
        num_matched = len(regions) + sum(r.is_region for r in refused.values())
        region = _region(pair, dependence, f"region {num_matched}")
        if isinstance(region, MoERegion):
            regions.append(region)
        else:
            refused[launch], matched[launch] = region, pair
    for launch, pair in matched.items():
        refused[launch] = _around_others(refused[launch], pair, launches, regions, dependence)
    others = [r for launch, r in refused.items() if r.is_region or launch not in used]
    return regions, others


@dataclass(frozen=True, slots=True)
class _Match:
    """Dispatches, their combines and the exchange that their split sizes come from."""

    payloads: Payloads
    count_exchange: fx.Node


def _match(
    dispatch: fx.Node, launches: list[fx.Node], used: set[fx.Node], dependence: Dependence
) -> _Match | Refused:
    if (back := reduce_scatter_of(dispatch, launches, dependence)) is not None:
        used.add(back)
        detail = f"sums are reduced at {source_place(back) or back.name}"
        return Refused(candidate=dispatch.name, reason=Reason.TOKENS_GATHERED, detail=detail)
    if not is_all_to_all(dispatch):
        detail = "a gather, a reduction or a broadcast"
        return Refused(
            candidate=dispatch.name, reason=Reason.NO_ROWS, detail=detail, is_candidate=False
        )
    if is_integer(dispatch):
        return Refused(candidate=dispatch.name, reason=Reason.NO_ROWS, detail="it carries integers")
    if not has_dynamic_splits(dispatch):
        sizes = {*output_splits(dispatch), *input_splits(dispatch)}
        reason = Reason.EVEN_SPLITS if len(sizes) <= 1 else Reason.NO_COUNT_EXCHANGE
        return Refused(candidate=dispatch.name, reason=reason)
    below = dependence.below([dispatch])
    free = (c for c in launches if c in below and c not in used and is_combine_of(dispatch, c))
    combine = next(free, None)
    if combine is None or not waits_on(combine):
        return Refused(candidate=dispatch.name, reason=Reason.NO_COMBINE)
    splits = [s for s in (*output_splits(dispatch), *input_splits(dispatch))]
    above = dependence.above(s for s in splits if isinstance(s, fx.Node))
    counts = [q for q in launches if q in above and is_integer(q) and _is_count_exchange(q)]
    if not counts:
        used.add(combine)  # what is wrong is said of the dispatch
        return Refused(candidate=dispatch.name, reason=Reason.NO_COUNT_EXCHANGE)
    return _Match(find_payloads(dispatch, combine, launches, used, dependence), counts[-1])


def _is_count_exchange(launch: fx.Node) -> bool:
    return is_all_gather(launch) or (is_all_to_all(launch) and not has_dynamic_splits(launch))


def _region(match: _Match, dependence: Dependence, name: str) -> MoERegion | Refused:
    def refuse(reason: Reason, detail: str = "") -> Refused:
        return Refused(candidate=name, reason=reason, detail=detail, is_region=True)

    exchange, payloads = match.count_exchange, match.payloads
    (counted,) = exchanges([exchange])
    got, counts = counted.result, forms_of_counts(exchange)[-1]
    there, back = map(exchanges, (payloads.dispatches, payloads.combines))
    num_ranks = len(output_splits(payloads.main))
    tensor = tensor_of(counts)
    if got is exchange or tensor is None:
        return refuse(Reason.NO_COUNT_EXCHANGE)
    if unread := [one for one in back if one.result is one.launch]:
        return refuse(Reason.NO_COMBINE, f"nothing waits for {operator_at(unread[0].launch)}")
    num_experts = number_of(tensor.numel())
    if num_experts is None:
        return refuse(Reason.COUNTS_NOT_COUNTED, operator_at(counts))
    if num_experts % num_ranks or not num_experts:
        return refuse(Reason.UNEVEN_EXPERTS, f"{num_experts} counts for {num_ranks} ranks")

    inputs = {*(one.sent for one in there), counts, got}
    down = dependence.below([counts, got, *payloads.dispatches])
    given = inputs | fillers_of_counts(exchange, dependence)
    up = dependence.above([one.result for one in back], stops=given)
    body = sorted((up & down) - given, key=dependence.position.__getitem__)
    if exchange in body:
        return refuse(Reason.COMMUNICATES, "the received counts are read before their last wait")
    inside = set(body)
    on_rows = dependence.below(payloads.dispatches)
    *back_beside, last = sorted(back, key=lambda one: one.result)
    early = dependence.below(one.result for one in back_beside) - inside
    (rows,) = (one for one in there if one.launch is payloads.main)
    region = MoERegion(
        name=name,
        rows=rows.sent,
        counts=counts,
        count_exchange=exchange,
        received_counts=got,
        dispatch=rows.launch,
        combine=last.launch,
        result=last.result,
        beside=tuple(one for one in there if one is not rows),
        back_beside=tuple(back_beside),
        between=tuple(node for node in dependence.in_order(early) if node < last.result),
        body=tuple(body),
        count_side=tuple(node for node in body if node not in on_rows),
        others=tuple(
            dict.fromkeys(
                i for n in body for i in n.all_input_nodes if i not in inside and i not in inputs
            )
        ),
        group=group_name(rows.launch),
        num_ranks=num_ranks,
        num_local_experts=num_experts // num_ranks,
    )
    return check_surroundings(region, dependence) or region


def _around_others(
    refused: Refused,
    match: _Match,
    launches: list[fx.Node],
    regions: list[MoERegion],
    dependence: Dependence,
) -> Refused:
    """Return the refusal of dispatches and combines; of a first hop where all inside are regions.

    That is where rows go to the group's peers, on to their experts, and back in two hops as well.
    """
    own = {match.count_exchange, *match.payloads.dispatches, *match.payloads.combines}
    inside = dependence.below(own) & dependence.above(match.payloads.combines) & set(launches) - own
    of_region = {
        launch: region for region in regions for launch in (region.count_exchange, *region.launches)
    }
    is_hop = bool(inside) and inside <= of_region.keys()
    if refused.reason is not Reason.COMMUNICATES or not is_hop:
        return refused
    hops = ", ".join(dict.fromkeys(of_region[n].name for n in launches if n in inside))
    first, last = match.payloads.main, match.payloads.combines[-1]
    detail = f"{hops} between {operator_at(first)} and {operator_at(last)}"
    return replace(refused, reason=Reason.OUTER_HOP, detail=detail)
