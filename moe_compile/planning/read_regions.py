"""The work around MoE and attention regions of a graph, for the planner.

Contract
    None where the rows of a region are a symbol, or its graph holds sizes that vary: the hint of
    such a size is this rank's own, and ranks must decide alike.
    Around a region counts what stands between its neighbours: a layer, where each has one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch.fx as fx

from moe_compile.analysis.attention_regions import AttentionRegion
from moe_compile.analysis.regions import MoERegion, RowProof
from moe_compile.graph.query import tensor_of
from moe_compile.ops.wire_format import row_bytes
from moe_compile.planning.dispatch_rules import rounding_of
from moe_compile.planning.gathered_sizes import GatheredWay
from moe_compile.planning.gathered_work import gathered_work
from moe_compile.planning.region_work import RegionWork
from moe_compile.planning.work_reader import Replayed, has_static_rows, read_work


def work_of_experts(
    region: MoERegion,
    proof: RowProof,
    others: Iterable[MoERegion] = (),
    way: GatheredWay | None = None,
) -> RegionWork | None:
    """Return the work around a MoE region; `others` are those of its graph.

    With `way` gathered tokens are a way to run it.
    """
    if not has_static_rows(region.rows):
        return None
    tensor = tensor_of(region.rows)
    assert tensor is not None
    replayed = Replayed(
        nodes=frozenset(region.body),
        exchanges={region.dispatch: "dispatch", region.combine: "combine"},
        expert_of=dict(proof.expert_rows),
        whole_weights=frozenset(node for node, _ in proof.unsliceable),
    )
    neighbours = [(other.count_exchange, other.result) for other in others]
    window = _window(region.dispatch.graph, region.rows, region.result, neighbours)
    work = RegionWork(
        work=read_work(region.dispatch.graph, window, replayed),
        num_ranks=region.num_ranks,
        num_parts=region.num_local_experts,
        row_bytes=float(tensor.numel() * tensor.element_size()),
        wire_shares=_wire_shares(region),
    )
    if way is None:
        return work
    is_bitwise = rounding_of(way.found).is_bitwise
    return replace(work, gathered=gathered_work(work, way), gather_is_bitwise=is_bitwise)


def work_of_attention(
    region: AttentionRegion, others: Iterable[AttentionRegion] = ()
) -> RegionWork | None:
    """Return the work around an attention region; `others` are those of its graph."""
    result = tensor_of(region.result)
    if result is None or not has_static_rows(region.result):
        return None
    graph = region.core.graph
    replayed = Replayed(
        nodes=frozenset(region.body), exchanges=dict.fromkeys(region.launches, "heads")
    )
    neighbours = [(other.exchanges[0], other.result) for other in others]
    window = _window(graph, region.exchanges[0], region.result, neighbours)
    return RegionWork(
        work=read_work(graph, window, replayed),
        num_ranks=region.num_ranks,
        num_parts=region.head.size if region.head else 1,
        row_bytes=float(result.numel() * result.element_size()),
    )


def _window(
    graph: fx.Graph, first: fx.Node, last: fx.Node, others: Iterable[tuple[fx.Node, fx.Node]]
) -> Collection[fx.Node]:
    """Return the nodes after the region before, and before the region after.

    `others` holds first and last node of each region; the one at hand may be among them.
    """
    others = list(others)
    before = [end for _, end in others if end < first]
    after = [start for start, _ in others if start > last]
    start, end = max(before, default=None), min(after, default=None)
    return frozenset(
        n
        for n in graph.nodes
        if (start is None or n > start or n is start) and (end is None or n < end)
    )


def _wire_shares(region: MoERegion) -> Mapping[str, float]:
    tensor = tensor_of(region.rows)
    if tensor is None or tensor.dim() != 2 or not tensor.dtype.is_floating_point:
        return {}
    width = tensor.shape[1]
    share = row_bytes(width) / (width * tensor.element_size())
    return {"fp8": share} if share < 1.0 else {}
