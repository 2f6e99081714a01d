"""The factors of a whole graph, experts included, and the candidates for the batch.

Contract
    The sums of a MoE region have the factors of its tokens; nodes between them, from the gather
    to the sums, are not followed. The result of an unknown operator has factors of its own, and the
    reason is noted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
import torch.fx as fx

from moe_compile.batch import batch_rules
from moe_compile.batch.batch_split import SplitRegion
from moe_compile.batch.token_shares import dims_of_slice
from moe_compile.dims.factors import Dims, Factor, Lost, flat, size_of, unify
from moe_compile.dims.sizes import SizeNumbers
from moe_compile.dims.tracker import Tracker
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.query import operator_at, tensor_of
from moe_compile.regions.row_chain import num_rows
from moe_compile.regions.token_sums import base_of


def follow_graph(
    facts: GraphFacts, regions: Collection[SplitRegion]
) -> tuple[Tracker, dict[fx.Node, str]]:
    """Return the factors of all nodes that can be followed, and why others cannot."""
    came_back = {num_rows(s.region.result): num_rows(s.region.rows) for s in regions}
    numbers = SizeNumbers(facts.graph, came_back)
    tracker, lost = Tracker(facts.modes, numbers), dict[fx.Node, str]()
    sums = {split.found.sums.total: split for split in regions}
    inner = {n for split in regions for n in inside(split)} - sums.keys()
    slices = {n: split for split in regions if split.share is not None for n in split.share.slices}
    for node in facts.graph.nodes:
        if node.op == "placeholder" and tensor_of(node) is not None:
            _start(tracker, node, lost)
        if node.op not in ("call_function", "call_method"):
            continue
        try:
            if node in sums:
                tracker.put(node, _summed(tracker, sums[node]))
            elif node in inner:
                lost[node] = ""
            elif node in slices and (dims := dims_of_slice(tracker, node, slices[node])):
                tracker.put(node, dims)
            else:
                batch_rules.follow(tracker, node)
        except Lost as refused:
            lost[node] = str(refused)
            _start(tracker, node, lost)
    return tracker, lost


def _summed(tracker: Tracker, split: SplitRegion) -> Dims:
    """Return the factors of a region's sums: their rows are the tokens'.

    So are the rows of their base, of the weights, and of the experts that are chosen.
    """
    found = split.found
    tokens, columns = tracker.dims(found.tokens)
    for node in (found.sums.weights, base_of(found.sums.total)):
        if node is not None:
            unify(tokens, tracker.dims(node)[0], prefix=True)
    if found.chosen is not None and split.share is None:
        chosen = [factor for dim in tracker.dims(found.chosen) for factor in dim]
        unify([*tokens, Factor(size_of(chosen) // size_of(tokens))], chosen)
    return [flat(tokens), [Factor(size_of(columns))]]


def _start(tracker: Tracker, node: fx.Node, lost: dict[fx.Node, str]) -> None:
    """Begin anew at `node`; a node whose sizes are not known is noted as lost."""
    try:
        tracker.start(node)
    except Lost as refused:
        lost.setdefault(node, f"{operator_at(node)}: {refused}")


def inside(split: SplitRegion) -> set[fx.Node]:
    """Return the nodes that send counts, and bring rows to their experts and back to the sums."""
    region, found, dependence = split.region, split.found, split.region.facts.dependence
    sent = dependence.below([region.counts]) & dependence.above([region.count_exchange])
    return {
        *sent,
        found.gather,
        *found.before,
        *region.body,
        *region.between,
        *found.after,
        *found.sums.tail,
        *(dependence.below([region.count_exchange]) & dependence.above([region.result])),
    }


def candidates(graph: fx.Graph, tracker: Tracker) -> Iterator[Factor]:
    """Yield the outermost factor of each dimension of inputs that are no parameters, in order."""
    seen: list[Factor] = []
    for node in graph.find_nodes(op="placeholder"):
        if node not in tracker or isinstance(tensor_of(node), torch.nn.Parameter):
            continue
        for dim in tracker.dims(node):
            for outer in flat(dim)[:1]:
                if outer not in seen:
                    seen.append(outer)
                    yield outer
