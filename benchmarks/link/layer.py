"""The layers that are measured: a routed MoE layer over a process group, and halves of it.

Shapes: T tokens of this rank, H width, F hidden width, E experts of all ranks, L = E / ranks local
experts, N = T x top_k routed rows sent, R rows received.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)

from benchmarks.link.cases import Case


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Which experts the tokens go to; rows are token x expert pairs, sorted by expert."""

    scores: torch.Tensor
    """`[N]`, in order of the rows."""
    token_of_row: torch.Tensor
    """`[N]`."""
    counts: torch.Tensor
    """Rows of every expert, `[E]`."""

    def combine(self, done_NH: torch.Tensor, x_TH: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's rows, weighted, in the shape and type of `x_TH`."""
        weighted = done_NH * self.scores[:, None].to(done_NH.dtype)
        return torch.zeros_like(x_TH).index_add(0, self.token_of_row, weighted)


def route(x_TH: torch.Tensor, router: torch.Tensor, top_k: int) -> Routing:
    """Send every token to the experts of its `top_k` greatest probabilities."""
    probabilities = torch.softmax(x_TH.float() @ router, dim=-1)
    scores, chosen = torch.topk(probabilities, top_k, dim=-1)
    expert_of_row = chosen.reshape(-1)
    order = torch.argsort(expert_of_row, stable=True)
    every_expert = torch.arange(router.shape[1], device=x_TH.device)
    return Routing(
        scores=scores.reshape(-1)[order],
        token_of_row=order // top_k,
        counts=(expert_of_row[:, None] == every_expert).sum(0),
    )


def run_experts(
    rows_RH: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Return SwiGLU of rows sorted by expert; `ends[e]` is where those of expert e end."""
    gated = F.silu(torch._grouped_mm(rows_RH, gate, offs=ends))
    hidden = gated * torch._grouped_mm(rows_RH, up, offs=ends)
    return torch._grouped_mm(hidden, down, offs=ends)


class MoELayer(nn.Module):
    """Top-k softmax router, uneven exchange, permutation by expert, grouped GEMM SwiGLU experts."""

    def __init__(self, case: Case, group: dist.ProcessGroup) -> None:
        """Make the router equal on all ranks and this rank's experts its own."""
        super().__init__()
        self.case, self.group = case, group
        self.num_ranks = dist.get_world_size(group)
        self.num_local = case.experts // self.num_ranks
        same = torch.Generator().manual_seed(0)
        own = torch.Generator().manual_seed(1 + dist.get_rank(group))
        self.router = _weight(same, case.width, case.experts, dtype=torch.float32)
        self.gate = _weight(own, self.num_local, case.width, case.hidden)
        self.up = _weight(own, self.num_local, case.width, case.hidden)
        self.down = _weight(own, self.num_local, case.hidden, case.width)
        if case.shared_expert:
            self.shared_gate_up = _weight(same, case.width, 2 * case.hidden)
            self.shared_down = _weight(same, case.hidden, case.width)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return what the experts make of the tokens, `[T, H]`."""
        routing = route(x_TH, self.router, self.case.top_k)
        counts = routing.counts

        received = all_to_all_single(counts, None, None, self.group)
        received = torch.ops._c10d_functional.wait_tensor(received)
        sent_rows = counts.view(self.num_ranks, -1).sum(1).tolist()
        received_rows = received.view(self.num_ranks, -1).sum(1).tolist()

        rows_RH = all_to_all_single_autograd(
            x_TH[routing.token_of_row], received_rows, sent_rows, self.group
        )
        done_RH = self._experts(rows_RH, received)
        back_NH = all_to_all_single_autograd(done_RH, sent_rows, received_rows, self.group)

        out = routing.combine(back_NH, x_TH)
        return out + self._shared(x_TH) if self.case.shared_expert else out

    def _experts(self, rows_RH: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Rows arrive sorted by sender, then expert; experts want them sorted by expert."""
        local = torch.arange(self.num_local, device=rows_RH.device).repeat(self.num_ranks)
        expert = torch.repeat_interleave(local, received, output_size=rows_RH.shape[0])
        by_expert = torch.argsort(expert, stable=True)
        ends = received.view(self.num_ranks, -1).sum(0).cumsum(0).to(torch.int32)

        done = run_experts(rows_RH[by_expert], self.gate, self.up, self.down, ends)
        return torch.zeros_like(done).index_copy(0, by_expert, done)

    def _shared(self, x_TH: torch.Tensor) -> torch.Tensor:
        gate, up = (x_TH @ self.shared_gate_up).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.shared_down


class TokenHalves(nn.Module):
    """The layer called on the first and on the second half of the tokens, results joined."""

    def __init__(self, layer: nn.Module) -> None:
        """Share the parameters of `layer`."""
        super().__init__()
        self.layer = layer

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return `[T, H]`."""
        return torch.cat([self.layer(half) for half in x_TH.chunk(2)])


def _weight(
    generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16
) -> nn.Parameter:
    """Return normal values scaled by the square root of the rows they are summed over."""
    return nn.Parameter((torch.randn(*shape, generator=generator) * shape[-2] ** -0.5).to(dtype))
