"""Whether gradients reach the rows of every chunk as they reach those of the whole region.

Contract
    Where they do, the backward pass of each chunk has the same exchanges as the region's. Where
    they do not, as with an expert whose rows or weights are detached, the exchanges of one chunk
    leave the backward pass: on this rank alone, if only its expert is detached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.fx as fx

from moe_compile.graph.query import called_name, has_gradient, overload_name, value_of, waits_on
from moe_compile.regions.regions import MoERegion, RowProof
from passes.replay.prune import Pruned, prune_other_experts


def chunk_without_gradient(
    region: MoERegion, proof: RowProof, bounds: Iterable[range]
) -> int | None:
    """Return the first chunk whose rows lack a gradient that the region's have, if any."""
    whole = _paths(region, Pruned())
    for chunk, experts in enumerate(bounds):
        pruned = prune_other_experts(region, proof, experts)
        if pruned.nodes and _paths(region, pruned) != whole:
            return chunk
    return None


@dataclass(frozen=True, slots=True)
class _Paths:
    """The exchanges of a region that take part in the backward pass."""

    back: frozenset[fx.Node]
    """Combines whose rows have a gradient."""
    there: frozenset[tuple[fx.Node, fx.Node]]
    """Pairs of dispatch and combine: rows of the dispatch get a gradient through the combine."""


def _paths(region: MoERegion, pruned: Pruned) -> _Paths:
    of_dispatch = {
        one.launch: [one.launch, *waits_on(one.launch)]
        for one in region.dispatched
        if any(map(has_gradient, [one.sent, one.launch, *waits_on(one.launch)]))
    }
    combines = {one.launch for one in region.combined}
    body, sources = set(region.body), dict[fx.Node, set[fx.Node]]()
    for launch, received in of_dispatch.items():
        sources.update((node, {launch}) for node in received)
    given = {n for one in region.dispatched for n in (one.launch, *waits_on(one.launch))}
    differentiable = set(sources)
    for node in region.row_side:
        carries = node in combines or value_of(node) is None or has_gradient(node)
        if node in pruned.nodes or node in given or not carries:
            continue
        gone = pruned.nodes | pruned.dropped_from.get(node, set())
        inputs = [i for i in _differentiated(node, region) if i not in gone]
        if any(i in differentiable or (i not in body and has_gradient(i)) for i in inputs):
            differentiable.add(node)
        sources[node] = set().union(*(sources.get(i, set()) for i in inputs))
    there = {(launch, combine) for combine in combines for launch in sources.get(combine, ())}
    return _Paths(frozenset(combines & differentiable), frozenset(there))


def _differentiated(node: fx.Node, region: MoERegion) -> list[fx.Node]:
    """Return the inputs to which `node` may give a gradient, writers of them included."""
    name = overload_name(node).partition("::")[2] or called_name(node)
    if name.endswith("_like") or name.startswith("new_"):  # read a shape and no value
        return []
    needs = region.facts.dependence.needs(node)
    shapes = node.all_input_nodes[1:] if name.endswith("_as") else []
    return [n for n in needs if n not in shapes]
