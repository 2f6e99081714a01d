"""Find MoE regions by data flow alone: no names, no annotations.

Contract
    Every launch of the graph ends in a region or gets a refusal; the graph is not edited.
    The answer is a function of the graph's structure, the same on every rank.

Pseudo-code
    for each all-to-all with split sizes known only at run time (a dispatch):
        combine = the first all-to-all below it, same group, the two split lists swapped
        count exchange = the nearest exchange of integers above the split sizes
        body = what depends on counts or dispatch, and the combine depends on
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch.fx as fx

from moe_compile.graph.dependence import Dependence, storages
from moe_compile.graph.legality import Legality
from moe_compile.graph.query import (
    expression_of,
    group_name,
    has_dynamic_splits,
    input_splits,
    is_all_gather,
    is_all_to_all,
    is_integer,
    is_launch,
    is_wait,
    number_of,
    output_splits,
    tensor_of,
)
from moe_compile.journal.reasons import Reason
from moe_compile.regions.regions import MoERegion, Refused

VALUE_KEEPING: Final = frozenset(
    {"to", "int", "long", "view", "reshape", "flatten", "contiguous", "clone", "detach", "alias"}
)
"""Methods that change the form of a tensor of counts, not its values or their flat order."""


def find_moe_regions(graph: fx.Graph) -> tuple[list[MoERegion], list[Refused]]:
    """Return the regions of a Dynamo graph in graph order, and a refusal per other launch."""
    dependence = Dependence(graph)
    launches = [node for node in graph.nodes if is_launch(node)]
    regions: list[MoERegion] = []
    refused: dict[fx.Node, Refused] = {}
    used: set[fx.Node] = set()
    for launch in launches:
        if launch in used:
            continue
        pair = _match(launch, launches, used, dependence)
        if isinstance(pair, Refused):
            refused[launch] = pair
            continue
        used |= {pair.count_exchange, pair.dispatch, pair.combine}
        num_matched = len(regions) + sum(r.is_region for r in refused.values())
        region = _region(pair, dependence, f"region {num_matched}")
        if isinstance(region, MoERegion):
            regions.append(region)
        else:
            refused[launch] = region
    others = [r for launch, r in refused.items() if r.is_region or launch not in used]
    return regions, others


@dataclass(frozen=True, slots=True)
class _Pair:
    """A dispatch, its combine and the exchange its split sizes come from."""

    dispatch: fx.Node
    combine: fx.Node
    result: fx.Node
    count_exchange: fx.Node


def _match(
    dispatch: fx.Node, launches: list[fx.Node], used: set[fx.Node], dependence: Dependence
) -> _Pair | Refused:
    if not is_all_to_all(dispatch):
        return Refused(candidate=dispatch.name, reason=Reason.NOT_ALL_TO_ALL)
    if is_integer(dispatch):
        return Refused(candidate=dispatch.name, reason=Reason.INTEGER_PAYLOAD)
    if not has_dynamic_splits(dispatch):
        sizes = {*output_splits(dispatch), *input_splits(dispatch)}
        reason = Reason.EVEN_SPLITS if len(sizes) <= 1 else Reason.NO_COUNT_EXCHANGE
        return Refused(candidate=dispatch.name, reason=reason)
    below = dependence.below([dispatch])
    combines = [c for c in launches if c in below and c not in used and _swapped(dispatch, c)]
    results = [r for c in combines[:1] if (r := _last_wait(c)) is not None]
    if not results:
        return Refused(candidate=dispatch.name, reason=Reason.NO_COMBINE)
    splits = [s for s in (*output_splits(dispatch), *input_splits(dispatch))]
    above = dependence.above(s for s in splits if isinstance(s, fx.Node))
    counts = [q for q in launches if q in above and is_integer(q) and _is_count_exchange(q)]
    if not counts:
        used.add(combines[0])  # what is wrong is said of the dispatch
        return Refused(candidate=dispatch.name, reason=Reason.NO_COUNT_EXCHANGE)
    return _Pair(dispatch, combines[0], results[0], counts[-1])


def _is_count_exchange(launch: fx.Node) -> bool:
    return is_all_gather(launch) or (is_all_to_all(launch) and not has_dynamic_splits(launch))


def _swapped(dispatch: fx.Node, combine: fx.Node) -> bool:
    if combine is dispatch or not is_all_to_all(combine):
        return False
    return (
        group_name(combine) == group_name(dispatch)
        and _same_sizes(output_splits(combine), input_splits(dispatch))
        and _same_sizes(input_splits(combine), output_splits(dispatch))
    )


def _same_sizes(left: list[object], right: list[object]) -> bool:
    return len(left) == len(right) and all(
        expression_of(a) == expression_of(b) for a, b in zip(left, right, strict=True)
    )


def _last_wait(launch: fx.Node) -> fx.Node | None:
    """Return the last of a chain of waits on `launch`."""
    node = next((user for user in launch.users if is_wait(user)), None)
    while node is not None:
        following = next((user for user in node.users if is_wait(user)), None)
        if following is None:
            return node
        node = following
    return None


def _forms_of_counts(exchange: fx.Node) -> list[fx.Node]:
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


def _region(pair: _Pair, dependence: Dependence, name: str) -> MoERegion | Refused:
    def refuse(reason: Reason, detail: str = "") -> Refused:
        return Refused(candidate=name, reason=reason, detail=detail, is_region=True)

    received = _last_wait(pair.count_exchange)
    *_, counts = _forms_of_counts(pair.count_exchange)
    rows = pair.dispatch.args[0]
    num_ranks = len(output_splits(pair.dispatch))
    tensor = tensor_of(counts)
    if received is None or not isinstance(rows, fx.Node) or tensor is None:
        return refuse(Reason.NO_COUNT_EXCHANGE)
    num_experts = number_of(tensor.numel())
    if num_experts is None:
        return refuse(Reason.COUNTS_NOT_COUNTED, counts.name)
    if num_experts % num_ranks or not num_experts:
        return refuse(Reason.UNEVEN_EXPERTS, f"{num_experts} counts for {num_ranks} ranks")

    inputs = {rows, counts, received}
    down = dependence.below([counts, received, pair.dispatch])
    up = dependence.above([pair.result], stops=inputs)
    body = sorted((up & down) - inputs, key=dependence.position.__getitem__)
    if pair.count_exchange in body:
        return refuse(Reason.COMMUNICATES, "the received counts are read before their last wait")
    inside = set(body)
    on_rows = dependence.below([pair.dispatch])
    region = MoERegion(
        name=name,
        rows=rows,
        counts=counts,
        count_exchange=pair.count_exchange,
        received_counts=received,
        dispatch=pair.dispatch,
        combine=pair.combine,
        result=pair.result,
        body=tuple(body),
        count_side=tuple(node for node in body if node not in on_rows),
        others=tuple(
            dict.fromkeys(
                i for n in body for i in n.all_input_nodes if i not in inside and i not in inputs
            )
        ),
        group=group_name(pair.dispatch),
        num_ranks=num_ranks,
        num_local_experts=num_experts // num_ranks,
    )
    return _check_surroundings(region, dependence) or region


def _check_surroundings(region: MoERegion, dependence: Dependence) -> Refused | None:
    """Refuse what replaying the body later, on parts of the rows, would change outside it."""
    inside = set(region.body)
    splits = [*output_splits(region.dispatch), *input_splits(region.dispatch)]
    for size in splits:
        if isinstance(size, fx.Node) and size not in inside:
            return _refused(region, Reason.NO_COUNT_EXCHANGE, size)
    for node in region.row_side:
        if is_launch(node) and node not in (region.dispatch, region.combine):
            return _refused(region, Reason.COMMUNICATES, node)
        if node.op == "call_method" and node.target in ("item", "tolist"):
            return _refused(region, Reason.HOST_READ_OF_ROWS, node)
    return _check_writes(region, dependence, inside)


def _refused(region: MoERegion, reason: Reason, node: fx.Node) -> Refused:
    return Refused(candidate=region.name, reason=reason, detail=node.name, is_region=True)


def _check_writes(
    region: MoERegion, dependence: Dependence, inside: set[fx.Node]
) -> Refused | None:
    outside = frozenset(
        s
        for node in (region.rows, region.counts, region.received_counts, *region.others)
        for s in storages(node)
    )
    for writer, written in dependence.writes.items():
        if writer in inside and (written & outside or not written):
            return _refused(region, Reason.MUTATES_OUTSIDE, writer)
        if _rewrites_counts(writer, written, region, dependence):
            return _refused(region, Reason.MUTATED_MEANWHILE, writer)
    body = [node for node in region.body if node is not region.result]
    graph = region.result.graph
    obstacle = Legality(dependence, graph).written_meanwhile(body, region.result)
    if obstacle is not None:
        return _refused(region, Reason.MUTATED_MEANWHILE, obstacle.because_of)
    return None


def _rewrites_counts(
    writer: fx.Node, written: frozenset[int], region: MoERegion, dependence: Dependence
) -> bool:
    """Whether `writer` may part the counts that the region reads from those that were exchanged.

    They are the same only while nothing writes any form of them from the first change of form on.
    """
    forms = _forms_of_counts(region.count_exchange)
    place = dependence.position
    first = place[forms[-2]] if len(forms) > 1 else place[region.count_exchange]
    if not first < place[writer] < place[region.result]:
        return False
    memory = frozenset(s for form in forms for s in storages(form))
    return not written or bool(written & memory)
