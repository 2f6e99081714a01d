"""Find MoE regions by data flow alone: no names, no annotations.

Contract
    Every launch of the graph ends in a region or gets a refusal; the graph is not edited.
    The answer is a function of the graph's structure, the same on every rank.

Pseudo-code
    for each all-to-all with split sizes known only at run time (a dispatch):
        combine = the first all-to-all below it, same group, the two split lists swapped
        beside them: tensors split alike that travel with the rows
        count exchange = the nearest exchange of integers above the split sizes
        body = nodes that depend on counts or a dispatch, and that a combine depends on

Also find experts without an all-to-all: the model gathers their tokens and reduces their sums.
The form is an all-gather followed by a reduce-scatter of as many rows over the same group.
Between them rows are moved twice by an index that depends on values, as a router's choice does:
picked for the experts, and put back. A dense layer of sequence parallelism moves no row by such
an index, and no reduce-scatter follows a gather of parameters. Experts that communicate between
the two are not reported.

Several exchanges may carry the rows of one region, in either direction.
Tensors that an all-to-all splits by the same two lists have as many entries along dim 0, one
per row, and entry i of each goes where row i goes: facts about the places of rows hold for all.

Worked example: tokens and their probabilities are sent, `[R, D]` and `[R]`, both split by
(received, sent); results come back, `[R, D]`, split by (sent, received).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.memory import tensors_in
from moe_compile.graph.query import (
    bytes_of_row,
    called_name,
    expression_of,
    group_name,
    has_dynamic_splits,
    input_splits,
    is_all_gather,
    is_all_to_all,
    is_integer,
    is_launch,
    is_reduce_scatter,
    number_of,
    operator_at,
    output_splits,
    source_place,
    tensor_of,
    value_of,
    waits_on,
)
from moe_compile.journal.entries import Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.regions.regions import MoERegion, exchanges
from moe_compile.regions.replayable import check_neighbours, fillers_of_counts, forms_of_counts


def find_moe_regions(facts: GraphFacts) -> tuple[list[MoERegion], list[Verdict]]:
    """Return the regions of a Dynamo graph in graph order, and a refusal per other launch."""
    launches = [node for node in facts.graph.nodes if is_launch(node)]
    search = _Search(facts, launches)
    regions: list[MoERegion] = []
    refused: dict[fx.Node, Verdict] = {}
    matched: dict[fx.Node, _Match] = {}
    used = search.used
    for launch in launches:
        if launch in used:
            continue
        pair = search.match(launch)
        if isinstance(pair, Verdict):
            refused[launch] = pair
            continue
        used |= {pair.count_exchange, *pair.payloads.dispatches, *pair.payloads.combines}
        num_matched = len(regions) + sum(r.is_region for r in refused.values())
        region = _region(pair, facts, f"region {num_matched}")
        if isinstance(region, MoERegion):
            regions.append(region)
        else:
            refused[launch], matched[launch] = region, pair
    for launch, pair in matched.items():
        refused[launch] = search.around_others(refused[launch], pair, regions)
    others = [r for launch, r in refused.items() if r.is_region or launch not in used]
    return regions, others


@dataclass(frozen=True, slots=True)
class _Match:
    """Dispatches, their combines and the exchange that their split sizes come from."""

    payloads: Payloads
    count_exchange: fx.Node


class _Search:
    """Looks for the regions of one graph, one launch after another."""

    def __init__(self, facts: GraphFacts, launches: Sequence[fx.Node]) -> None:
        self.facts, self.launches = facts, launches
        self.used: set[fx.Node] = set()
        """Launches that already belong to a match or a refusal."""

    def match(self, dispatch: fx.Node) -> _Match | Verdict:
        """Return the match of a dispatch of rows, or the verdict on a launch that is none."""
        dependence, launches, used = self.facts.dependence, self.launches, self.used
        if (back := self._reduce_scatter_of(dispatch)) is not None:
            used.add(back)
            detail = f"a reduce-scatter returns their sums, at {source_place(back) or back.name}"
            return Verdict(candidate=dispatch.name, reason=Reason.TOKENS_GATHERED, detail=detail)
        if not is_all_to_all(dispatch):
            detail = "it must be an all-to-all, and is a gather, a reduction or a broadcast"
            return Verdict(
                candidate=dispatch.name, reason=Reason.NO_ROWS, detail=detail, is_told=False
            )
        if is_integer(dispatch):
            return Verdict(
                candidate=dispatch.name, reason=Reason.NO_ROWS, detail="it carries integers"
            )
        if not has_dynamic_splits(dispatch):
            sizes = {*output_splits(dispatch), *input_splits(dispatch)}
            reason = Reason.EVEN_SPLITS if len(sizes) <= 1 else Reason.NO_COUNT_EXCHANGE
            return Verdict(candidate=dispatch.name, reason=reason)
        below = dependence.below([dispatch])
        free = (c for c in launches if c in below and c not in used and is_combine_of(dispatch, c))
        combine = next(free, None)
        if combine is None or not waits_on(combine):
            return Verdict(candidate=dispatch.name, reason=Reason.NO_COMBINE)
        splits = [s for s in (*output_splits(dispatch), *input_splits(dispatch))]
        above = dependence.above(s for s in splits if isinstance(s, fx.Node))
        counts = [q for q in launches if q in above and is_integer(q) and _is_count_exchange(q)]
        if not counts:
            used.add(combine)  # the refusal names the dispatch
            return Verdict(candidate=dispatch.name, reason=Reason.NO_COUNT_EXCHANGE)
        return _Match(self._payloads(dispatch, combine), counts[-1])

    def around_others(self, refused: Verdict, match: _Match, regions: list[MoERegion]) -> Verdict:
        """Return the refusal of a match, as an outer hop if all launches inside belong to regions.

        In that case rows go to the group's peers, on to their experts, and back in two hops too.
        """
        dependence, launches = self.facts.dependence, self.launches
        own = {match.count_exchange, *match.payloads.dispatches, *match.payloads.combines}
        inside = (
            dependence.below(own) & dependence.above(match.payloads.combines) & set(launches) - own
        )
        of_region = {
            launch: region
            for region in regions
            for launch in (region.count_exchange, *region.launches)
        }
        is_hop = bool(inside) and inside <= of_region.keys()
        if refused.reason is not Reason.COMMUNICATES or not is_hop:
            return refused
        hops = ", ".join(dict.fromkeys(of_region[n].name for n in launches if n in inside))
        first, last = match.payloads.main, match.payloads.combines[-1]
        detail = f"it holds {hops}, between {operator_at(first)} and {operator_at(last)}"
        return replace(refused, reason=Reason.OUTER_HOP, detail=detail)

    def _reduce_scatter_of(self, gather: fx.Node) -> fx.Node | None:
        """Return the reduce-scatter of the experts' results on the tokens that `gather` brings."""
        waits = waits_on(gather)
        tokens = tensor_of(waits[-1]) if waits else None
        if not is_all_gather(gather) or tokens is None or not tokens.is_floating_point():
            return None
        dependence = self.facts.dependence
        below = dependence.below([gather]) - {gather}
        back = next((n for n in self.launches if n in below and is_reduce_scatter(n)), None)
        sums = tensor_of(back.all_input_nodes[0]) if back is not None else None
        if back is None or sums is None or group_name(back) != group_name(gather):
            return None
        between = (below & dependence.above([back])) - {back}
        if any(is_launch(node) for node in between) or not _as_many_rows(tokens, sums):
            return None
        moves = [node for node in between if _moves_rows(node, between)]
        return back if len(moves) >= PICKED_AND_PUT_BACK else None

    def _payloads(self, dispatch: fx.Node, combine: fx.Node) -> Payloads:
        """Return `dispatch`, `combine`, and the exchanges beside them.

        These are split alike. A dispatch among them is needed by some combine, a combine depends on
        some dispatch, and none depends on a result that came back.
        """
        dependence = self.facts.dependence
        free = [n for n in self.launches if is_all_to_all(n) and n not in self.used]
        alike = [n for n in free if _is_same_exchange(dispatch, n)]
        swapped = [n for n in free if is_combine_of(dispatch, n)]
        there, back = {dispatch}, {combine}
        while True:
            below, above = dependence.below(there), dependence.above(back)
            after = dependence.below({user for launch in back for user in launch.users})
            new_there = {n for n in alike if n in above and n not in after} - there - back
            new_back = {n for n in swapped if n in below and n not in after} - there - back
            if not new_there and not new_back:
                break
            there |= new_there
            back |= new_back
        return Payloads(tuple(dependence.in_order(there)), tuple(dependence.in_order(back)))


def _is_count_exchange(launch: fx.Node) -> bool:
    return is_all_gather(launch) or (is_all_to_all(launch) and not has_dynamic_splits(launch))


def _region(match: _Match, facts: GraphFacts, name: str) -> MoERegion | Verdict:
    def refuse(reason: Reason, detail: str = "") -> Verdict:
        return Verdict(candidate=name, reason=reason, detail=detail, is_region=True)

    exchange, payloads, dependence = match.count_exchange, match.payloads, facts.dependence
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
        return refuse(
            Reason.UNEVEN_EXPERTS,
            f"every rank must have equally many experts, but {num_experts} counts do not "
            f"divide over {num_ranks} ranks",
        )

    inputs = {*(one.sent for one in there), counts, got}
    down = dependence.below([counts, got, *payloads.dispatches])
    given = inputs | fillers_of_counts(exchange, dependence)
    up = dependence.above([one.result for one in back], stops=given)
    body = sorted((up & down) - given, key=dependence.position.__getitem__)
    if exchange in body:
        return refuse(
            Reason.COMMUNICATES,
            "the received counts must be read after their last wait, and are read before it",
        )
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
        facts=facts,
    )
    why = check_neighbours(region)
    return region if why is None else refuse(why.reason, why.detail)


BY_INDEX: Final = frozenset(
    {
        "getitem", "setitem", "index_select", "gather", "take_along_dim", "index_add", "index_copy",
        "index_put", "scatter", "scatter_add", "scatter_reduce",
    }
)  # fmt: skip
"""Operators, written in place or not, that move rows by an index."""

MADE: Final = ("zeros", "ones", "empty", "full", "arange", "rand")
"""Parts of the names of operators that read no values of the tensors they are given."""

PICKED_AND_PUT_BACK: Final = 2


def _as_many_rows(tokens: torch.Tensor, sums: torch.Tensor) -> bool:
    rows = [expression_of(t.shape[0]) if t.dim() else None for t in (tokens, sums)]
    return rows[0] is not None and rows[0] == rows[1]


def _moves_rows(node: fx.Node, between: Collection[fx.Node]) -> bool:
    """Whether the node moves rows of the gathered tokens by an index that depends on values."""
    if called_name(node).rstrip("_") not in BY_INDEX:
        return False
    moved = [n for n in _read(node) if not _is_index(n)]
    indices = [n for n in _read(node) if _is_index(n)]
    return any(n in between for n in moved) and any(map(_is_chosen, indices))


def _read(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if tensor_of(n) is not None]


def _is_index(node: fx.Node) -> bool:
    tensor = tensor_of(node)
    return is_integer(node) or (tensor is not None and tensor.dtype is torch.bool)


def _is_chosen(index: fx.Node) -> bool:
    """Whether `index` depends on values of floating-point numbers, as by `topk` or a comparison."""
    todo, seen = [index], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in seen or any(name in called_name(node) for name in MADE):
            continue
        seen.add(node)
        tensors = [n for n in node.all_input_nodes if tensors_in(value_of(n))]
        if any(t.is_floating_point() for n in tensors for t in tensors_in(value_of(n))):
            return True
        todo += tensors
    return False


@dataclass(frozen=True, slots=True)
class Payloads:
    """The exchanges of one region, each tuple in graph order."""

    dispatches: tuple[fx.Node, ...]
    combines: tuple[fx.Node, ...]

    @property
    def main(self) -> fx.Node:
        """The dispatch of the rows: the one that sends most bytes a row, integers aside."""
        rows = [launch for launch in self.dispatches if not is_integer(launch)]
        return max(rows or self.dispatches, key=_row_bytes)  # of equal ones the first


def is_combine_of(dispatch: fx.Node, other: fx.Node) -> bool:
    """Whether `other`, by its splits, sends back the rows that `dispatch` received."""
    return (
        other is not dispatch
        and is_all_to_all(other)
        and group_name(other) == group_name(dispatch)
        and _same_sizes(output_splits(other), input_splits(dispatch))
        and _same_sizes(input_splits(other), output_splits(dispatch))
    )


def _is_same_exchange(dispatch: fx.Node, other: fx.Node) -> bool:
    return (
        group_name(other) == group_name(dispatch)
        and _same_sizes(output_splits(other), output_splits(dispatch))
        and _same_sizes(input_splits(other), input_splits(dispatch))
    )


def _same_sizes(left: list[object], right: list[object]) -> bool:
    return len(left) == len(right) and all(
        expression_of(a) == expression_of(b) for a, b in zip(left, right, strict=True)
    )


def _row_bytes(launch: fx.Node) -> int:
    return bytes_of_row(tensor_of(launch.all_input_nodes[0]))
