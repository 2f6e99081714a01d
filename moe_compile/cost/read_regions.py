"""The work around MoE and attention regions of a graph, for the planner.

Contract
    None where the rows of a region, or the inputs of the layer around it, have a symbolic size:
    the hint of such a size is this rank's own, and ranks must decide alike.
    The work around a region is all work of its layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch.fx as fx

from moe_compile.attention.attention_regions import AttentionRegion
from moe_compile.capacity.capacity_regions import CapacityRegion
from moe_compile.cost.cost_model import is_of_host
from moe_compile.cost.region_work import RegionWork, Work
from moe_compile.cost.traced_nodes import TracedNodes
from moe_compile.graph.query import tensor_of
from moe_compile.hardware import HardwareProfile
from moe_compile.ops.wire_format import row_bytes
from moe_compile.regions.regions import MoERegion, RowProof


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """The nodes of a region that run once per chunk, and how."""

    nodes: Collection[fx.Node]
    exchanges: Mapping[fx.Node, str]
    """Launch -> `dispatch`, `combine`, `beside` these or `heads`."""
    expert_of: Mapping[fx.Node, int] = field(default_factory=dict)
    whole_weights: Collection[fx.Node] = ()
    """Products of which every chunk reads all weights."""


def work_of_experts(
    region: MoERegion,
    proof: RowProof,
    hardware: HardwareProfile,
    layer: TracedNodes | None = None,
) -> RegionWork | None:
    """Return the work around a MoE region in its `layer`, or in all of its graph."""
    tensor = tensor_of(region.rows)
    if tensor is None or not has_static_rows(region.rows):
        return None
    replayed = Replayed(
        nodes=frozenset(region.body),
        exchanges={
            **{one.launch: "beside" for one in (*region.beside, *region.back_beside)},
            region.dispatch: "dispatch",
            region.combine: "combine",
        },
        expert_of=dict(proof.expert_rows),
        whole_weights=frozenset(node for node, _ in proof.unsliceable),
    )
    return read_work(
        layer or TracedNodes(region.dispatch.graph),
        replayed,
        RegionWork(
            forward=(),
            num_ranks=region.num_ranks,
            num_parts=region.num_local_experts,
            row_bytes=float(tensor.numel() * tensor.element_size()),
            writes_joined=is_of_host(tensor, hardware),
            wire_shares=_wire_shares(region),
        ),
    )


def work_of_attention(
    region: AttentionRegion, layer: TracedNodes | None = None
) -> RegionWork | None:
    """Return the work around an attention region in its `layer`, or in all of its graph."""
    result = tensor_of(region.result)
    if result is None or not has_static_rows(region.result):
        return None
    replayed = Replayed(
        nodes=frozenset(region.body), exchanges=dict.fromkeys(region.launches, "heads")
    )
    return read_work(
        layer or TracedNodes(region.core.graph),
        replayed,
        RegionWork(
            forward=(),
            num_ranks=region.num_ranks,
            num_parts=region.head.size if region.head else 1,
            row_bytes=float(result.numel() * result.element_size()),
            in_slices=True,
        ),
    )


def work_of_capacity(region: CapacityRegion, layer: TracedNodes | None = None) -> RegionWork | None:
    """Return the work around experts with a capacity in their `layer`, or in all of the graph."""
    tensor = tensor_of(region.rows)
    if tensor is None or not has_static_rows(region.rows):
        return None
    replayed = Replayed(
        nodes=frozenset(region.body),
        exchanges={region.dispatch: "dispatch", region.combine: "combine"},
        expert_of=region.expert_of,
    )
    return read_work(
        layer or TracedNodes(region.dispatch.graph),
        replayed,
        RegionWork(
            forward=(),
            num_ranks=region.num_ranks,
            num_parts=region.num_local_experts,
            row_bytes=float(tensor.numel() * tensor.element_size()),
            in_slices=True,
        ),
    )


def read_work(layer: TracedNodes, replayed: Replayed, empty: RegionWork) -> RegionWork | None:
    """Return `empty` with the work of `layer`; None where the region is given a varying size.

    None as well for a graph that torch cannot trace by itself.
    """
    if not {*replayed.nodes, *replayed.exchanges} <= set(layer.program.origins):
        return None
    phases = [tuple(_with_role(*one, replayed) for one in phase) for phase in layer.phases]
    if not phases:
        return None
    forward, *backward = phases
    return replace(empty, forward=forward, backward=backward[0] if backward else ())


def has_static_rows(node: fx.Node) -> bool:
    """Whether every size of the node's tensor is a number."""
    tensor = tensor_of(node)
    return tensor is not None and all(type(size) is int for size in tensor.shape)


def _with_role(work: Work, node: fx.Node | None, replayed: Replayed) -> Work:
    """Return `work` with the role of its node in the region."""
    if node is None:
        return work
    exchange = work.exchange and replayed.exchanges.get(node, "other")
    is_replayed = node in replayed.nodes and not work.quantises_weight
    return replace(
        work,
        exchange=exchange,
        is_chunked=is_replayed or exchange not in ("", "other"),
        expert=replayed.expert_of.get(node),
        slices_weights=node not in replayed.whole_weights,
    )


def _wire_shares(region: MoERegion) -> Mapping[str, float]:
    tensor = tensor_of(region.rows)
    if tensor is None or tensor.dim() != 2 or not tensor.dtype.is_floating_point:
        return {}
    width = tensor.shape[1]
    share = row_bytes(width) / (width * tensor.element_size())
    return {"fp8": share} if share < 1.0 else {}
