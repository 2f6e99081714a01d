"""gpt_oss's experts, by grouped GEMMs as one graph.

Contract
    Values and gradients are those of torchtitan's `_run_experts_grouped_mm`, bit for bit. That
    function reads on the host how many rows no expert has, and branches on it, which no graph can
    hold; here each row finds its expert by its place, and nothing is read.
    Ranks that divide an expert's columns each add their share of its second bias. torchtitan 0.2.2
    adds the whole of it on each rank where these ranks also divide the experts.

Shapes: rows `x` `[R, D]`, sorted by expert, then rows of no expert; counts `[E]`; biases `[E, F]`.
"""

from __future__ import annotations

import functools

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.gpt_oss.model.moe import (
    GptOssGroupedExperts,
    ScaleBiasForward,
    _run_experts_for_loop,
    indices_padding_wrapper,
    swiglu,
)


def run_as_one_graph(experts: GptOssGroupedExperts) -> None:
    """Have `experts` run without that branch; those without grouped GEMMs have none.

    To be called before they are laid out: what torchtitan does around them still runs.
    """
    experts.forward = functools.partial(_run, experts)


def _run(experts: GptOssGroupedExperts, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return what `GptOssGroupedExperts.forward` does, on the same meshes."""
    first = experts.mlp1_weight
    mesh = first.device_mesh if isinstance(first, DTensor) else None
    axes = () if mesh is None else mesh.mesh_dim_names
    parameters = (first, experts.mlp1_bias, experts.mlp2_weight, experts.mlp2_bias)
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    num_shards = 1
    for place, axis in enumerate(axes):  # Dynamo follows no product of a generator
        num_shards *= mesh.size(place) if axis in ("tp", "etp") else 1
    if not experts.use_grouped_mm:
        run = _run_experts_for_loop
    else:
        run = _grouped if "ep" in axes else indices_padding_wrapper(_grouped)
    result: torch.Tensor = run(*local, experts.swiglu_limit, x, counts, num_shards)
    return result


def _grouped(
    weight1: torch.Tensor,
    bias1: torch.Tensor,
    weight2: torch.Tensor,
    bias2: torch.Tensor,
    limit: float,
    x: torch.Tensor,
    counts: torch.Tensor,
    num_shards: int,
) -> torch.Tensor:
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    expert_of = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device), right=True)
    h = torch._grouped_mm(x.bfloat16(), weight1.transpose(-2, -1).bfloat16(), offs=ends)
    h = swiglu(h + _of_rows(bias1, expert_of).to(h.dtype), limit=limit)
    h = torch._grouped_mm(h, weight2.transpose(-2, -1).bfloat16(), offs=ends)
    scaled = ScaleBiasForward.apply(bias2, num_shards)
    return h + _of_rows(scaled, expert_of).to(h.dtype)


def _of_rows(bias: torch.Tensor, expert_of: torch.Tensor) -> torch.Tensor:
    """Return the bias of each row's expert; zero for rows of none."""
    zeros = torch.zeros(1, bias.shape[1], dtype=bias.dtype, device=bias.device)
    return torch.cat([bias, zeros]).index_select(0, expert_of)
