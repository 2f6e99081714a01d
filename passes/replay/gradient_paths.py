"""Whether gradients reach the rows of every chunk as they reach those of the whole region.

Contract
    Where they do, the backward pass of each chunk has the exchanges that the region's has. Where
    they do not, as with an expert whose rows or weights are detached, the exchanges of one chunk
    leave the backward pass: on this rank alone, if only its expert is detached.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx as fx

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.query import called_name, has_gradient, overload_name, value_of, waits_on
from moe_compile.regions.regions import MoERegion, RowProof
from passes.replay.prune import Pruned, prune_other_experts


def chunk_without_gradient(
    region: MoERegion, proof: RowProof, bounds: Iterable[range], dependence: Dependence
) -> int | None:
    """Return the first chunk whose rows get no gradient where the region's do, None without one."""
    whole = _paths(region, Pruned(), dependence)
    for chunk, experts in enumerate(bounds):
        pruned = prune_other_experts(region, proof, experts)
        if pruned.nodes and _paths(region, pruned, dependence) != whole:
            return chunk
    return None


def _paths(region: MoERegion, pruned: Pruned, dependence: Dependence) -> tuple[bool, bool]:
    """Return whether the rows sent back have a gradient, and whether the received get theirs."""
    received = [region.dispatch, *waits_on(region.dispatch)]
    body, differentiable, from_rows = set(region.body), set[fx.Node](), set[fx.Node]()
    if any(map(has_gradient, [region.rows, *received])):
        differentiable.update(received)
        from_rows.update(received)
    for node in region.row_side:
        if node in pruned.nodes or node in received or not _carries(node, region):
            continue
        gone = pruned.nodes | pruned.dropped_from.get(node, set())
        inputs = [i for i in _differentiated(node, dependence) if i not in gone]
        if any(i in differentiable or (i not in body and has_gradient(i)) for i in inputs):
            differentiable.add(node)
        if any(i in from_rows for i in inputs):
            from_rows.add(node)
    return region.combine in differentiable, region.combine in from_rows


def _carries(node: fx.Node, region: MoERegion) -> bool:
    """Whether a gradient may flow through what `node` makes; unknown values may carry one."""
    return node is region.combine or value_of(node) is None or has_gradient(node)


def _differentiated(node: fx.Node, dependence: Dependence) -> list[fx.Node]:
    """Return what `node` may give a gradient to, writers of what it reads among them."""
    name = overload_name(node).partition("::")[2] or called_name(node)
    if name.endswith("_like") or name.startswith("new_"):  # read a form and no value
        return []
    needs = dependence.needs(node)
    shapes = node.all_input_nodes[1:] if name.endswith("_as") else []
    return [n for n in needs if n not in shapes]
