"""torchtitan 0.2.2's experts and expert parallelism, unmodified, behind a small router."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.moe.moe import GroupedExperts


def permute_indices(counts, num_local, num_ranks, max_len, alignment, use_cpu=False):
    """Return what torchtitan's kernel returns, by torch operators: it needs a GPU."""
    start = torch.cumsum(counts, 0) - counts
    total = torch.clamp_min(counts.view(num_ranks, -1).sum(0), alignment)
    sizes = ((total + alignment - 1) // alignment * alignment).to(torch.int32)
    ends = torch.cumsum(sizes, 0)
    by_rank = counts.view(num_ranks, num_local)
    there = ((ends - sizes) + torch.cumsum(by_rank, 0) - by_rank).reshape(-1)
    slot = torch.arange(max_len)[:, None]
    inside = (slot >= there) & (slot < there + counts)
    row = torch.where(inside, slot - there + start, 0).sum(1)
    return torch.where(inside.any(1), row, -1).to(torch.int32), sizes, ends.to(torch.int32)


def permute_indices_by_kernel(counts, num_local, num_ranks, max_len, alignment, use_cpu=False):
    """Return the same, the indices written by an operator that says nothing of what it does."""
    _, sizes, ends = permute_indices(counts, num_local, num_ranks, max_len, alignment)
    indices = torch.full((max_len,), -1, dtype=torch.int32)
    fill_indices(counts.clone(), ends - sizes, indices)
    return indices, sizes, ends


@torch.library.custom_op("megamoe_tests::fill_indices", mutates_args={"indices"})
def fill_indices(counts: torch.Tensor, starts: torch.Tensor, indices: torch.Tensor) -> None:
    run_starts = torch.cumsum(counts, 0) - counts
    for expert, place in enumerate(starts.tolist()):
        for run in range(expert, len(counts), len(starts)):
            rows = int(counts[run])
            indices[place : place + rows] = torch.arange(rows) + run_starts[run]
            place += rows


@fill_indices.register_fake
def _(counts, starts, indices):
    return None


class TitanExperts(nn.Module):
    """`ExpertParallel` dispatches, pads to a multiple of 8, and combines."""

    def __init__(self, width, hidden, experts, top_k, group, use_grouped_mm):
        super().__init__()
        self.num_experts, self.top_k = experts, top_k
        self.router = nn.Parameter(torch.randn(width, experts))
        self.experts = GroupedExperts(width, hidden, experts, use_grouped_mm)
        with torch.no_grad():
            self.experts.init_weights(0.02)
        mesh = init_device_mesh("cpu", (group.size(),), mesh_dim_names=("ep",))
        self.dispatcher = ExpertParallel()
        self.dispatcher._apply(self.experts, mesh)

    def forward(self, x):
        scores, chosen = torch.topk(torch.softmax(x @ self.router, -1), self.top_k, -1)
        order = torch.argsort(chosen.reshape(-1), stable=True)
        counts = (chosen.reshape(-1, 1) == torch.arange(self.num_experts)).sum(0)
        out = self.experts(x[order // self.top_k], counts)
        out = out * scores.reshape(-1)[order][:, None]
        return torch.zeros_like(x).index_add(0, order // self.top_k, out)
