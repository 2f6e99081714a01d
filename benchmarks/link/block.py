"""A transformer block over a process group: attention and experts, each divided in one of two ways.

Rank r has the r-th part of the sequence, which comes first as in Megatron: `[S / n, B, H]`; with
attention "dp" the r-th part of the sequences, `[S, B / n, H]`.

    attention "tp"  gather the sequence, attend with this rank's heads, reduce-scatter the result
    attention "dp"  every rank has its own sequences, and all weights
    attention "sp"  Ulysses, by the recipe's own exchanges; every rank has all weights
    experts "tp"    gather the tokens, 1 / n of every expert's hidden width, reduce-scatter
    experts "a2a"   the routed layer of benchmarks/link/layer.py, whose experts the ranks share out

A gradient that every rank has a part of only (`replicated_names`) is not summed within a step: that
belongs to data parallelism, and is the one thing the ways of attention differ in beyond a block.

Shapes: S sequence, B sequences, n ranks, T = S B / n tokens of this rank, H width, E experts, F
hidden width, R routed rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.link.cases import BlockCase, Plan
from benchmarks.link.collectives import gather, reduce_scatter
from benchmarks.link.layer import MoELayer, route, run_experts
from torchtitan_integration.ulysses import to_heads, to_sequence

EPSILON: Final = 1e-5
"""Of the norms, as in Llama."""
Weights = Mapping[str, torch.Tensor]


class _Attention(nn.Module):
    """Causal attention with grouped KV heads, weights of `1 / num_parts` of the heads."""

    def __init__(self, case: BlockCase, group: dist.ProcessGroup, num_parts: int) -> None:
        super().__init__()
        self.group = group
        self.head_width = case.width // case.heads
        queries = case.width // num_parts
        keys = case.kv_heads * self.head_width // num_parts
        self.q = nn.Parameter(torch.empty(case.width, queries))
        self.k = nn.Parameter(torch.empty(case.width, keys))
        self.v = nn.Parameter(torch.empty(case.width, keys))
        self.out = nn.Parameter(torch.empty(queries, case.width))

    def project(self, x_SBH: torch.Tensor) -> list[torch.Tensor]:
        """Return q, k and v, each `[B, heads, S, D]`."""
        return [
            (x_SBH @ weight).unflatten(-1, (-1, self.head_width)).permute(1, 2, 0, 3)
            for weight in (self.q, self.k, self.v)
        ]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def output(self, heads: torch.Tensor) -> torch.Tensor:
        """Return `[S, B, H]` of `[B, heads, S, D]`."""
        return heads.permute(2, 0, 1, 3).flatten(2) @ self.out


class TensorParallelAttention(_Attention):
    """Every rank attends to the whole sequence with the heads whose weights it has."""

    def __init__(self, case: BlockCase, group: dist.ProcessGroup) -> None:
        """Make room for the weights of this rank's heads."""
        super().__init__(case, group, case.num_ranks)

    def forward(self, x_SBH: torch.Tensor) -> torch.Tensor:
        """Return attention of this rank's part of the sequence."""
        whole = gather(x_SBH, self.group)
        return reduce_scatter(self.output(self.attend(*self.project(whole))), self.group)


class SequenceParallelAttention(_Attention):
    """Every rank projects its own part of the sequence, and trades heads around the attention."""

    def __init__(self, case: BlockCase, group: dist.ProcessGroup) -> None:
        """Make room for all weights."""
        super().__init__(case, group, 1)

    def forward(self, x_SBH: torch.Tensor) -> torch.Tensor:
        """Return attention of this rank's part of the sequence."""
        q, k, v = (to_heads(x, self.group) for x in self.project(x_SBH))
        return self.output(to_sequence(self.attend(q, k, v), self.group))


class WholeAttention(_Attention):
    """Every rank has sequences of its own, and all weights."""

    def __init__(self, case: BlockCase, group: dist.ProcessGroup) -> None:
        """Make room for all weights."""
        super().__init__(case, group, 1)

    def forward(self, x_SBH: torch.Tensor) -> torch.Tensor:
        """Return attention of this rank's sequences."""
        return self.output(self.attend(*self.project(x_SBH)))


class TensorParallelExperts(nn.Module):
    """Every rank runs all tokens through its columns of every expert; their sum is the result.

    Every rank routes every token: that costs less than exchanging what one rank decided.
    """

    def __init__(self, case: BlockCase, group: dist.ProcessGroup) -> None:
        """Make room for this rank's part of every expert."""
        super().__init__()
        self.group, self.top_k, self.experts = group, case.top_k, case.experts
        hidden = case.hidden // case.num_ranks
        shape = (case.experts, case.width, hidden)
        self.router = nn.Parameter(torch.empty(case.width, case.experts))
        self.gate = nn.Parameter(torch.empty(shape))
        self.up = nn.Parameter(torch.empty(shape))
        self.down = nn.Parameter(torch.empty(case.experts, hidden, case.width))

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return what the experts make of this rank's tokens, `[T, H]`."""
        whole = gather(x_TH, self.group)
        routing = route(whole, self.router, self.top_k)
        ends = routing.counts.cumsum(0).to(torch.int32)
        rows_RH = whole[routing.token_of_row]
        done_RH = run_experts(rows_RH, self.gate, self.up, self.down, ends)
        return reduce_scatter(routing.combine(done_RH, whole), self.group)


ATTENTIONS: Final = {
    "tp": TensorParallelAttention, "sp": SequenceParallelAttention, "dp": WholeAttention,
}  # fmt: skip
EXPERTS: Final[dict[str, Any]] = {"tp": TensorParallelExperts, "a2a": MoELayer}


class Block(nn.Module):
    """Attention and experts, each after a norm and around a residual."""

    def __init__(self, case: BlockCase, group: dist.ProcessGroup, plan: Plan) -> None:
        """Divide the block over `group`; the weights are to be loaded."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(case.width, eps=EPSILON)
        self.attention = ATTENTIONS[plan.attention](case, group)
        self.experts_norm = nn.RMSNorm(case.width, eps=EPSILON)
        self.experts = EXPERTS[plan.experts](case, group)

    def forward(self, x_SBH: torch.Tensor) -> torch.Tensor:
        """Return `[S / n, B, H]`."""
        x_SBH = x_SBH + self.attention(self.attention_norm(x_SBH))
        x_TH = self.experts_norm(x_SBH).flatten(0, 1)
        return x_SBH + self.experts(x_TH).view_as(x_SBH)


class Stack(nn.Module):
    """Blocks one after another."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        """Run `blocks` in their order."""
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x_SBH: torch.Tensor) -> torch.Tensor:
        """Return what the last block makes."""
        for block in self.blocks:
            x_SBH = block(x_SBH)
        return x_SBH


def part_of_rank(
    weights: Weights, case: BlockCase, plan: Plan, rank: int
) -> dict[str, torch.Tensor]:
    """Return what this rank holds of the whole block's weights, or of their gradients.

    The names of what is returned are those of `Block`.
    """

    def mine(name: str, dim: int) -> torch.Tensor:
        return weights[name].chunk(case.num_ranks, dim)[rank]

    divided = plan.attention == "tp"
    by_expert = plan.experts == "a2a"
    parts = {
        "attention_norm.weight": weights["attention_norm"],
        **{f"attention.{x}": mine(x, 1) if divided else weights[x] for x in ("q", "k", "v")},
        "attention.out": mine("out", 0) if divided else weights["out"],
        "experts_norm.weight": weights["experts_norm"],
        "experts.router": weights["router"],
        "experts.gate": mine("gate", 0 if by_expert else 2),
        "experts.up": mine("up", 0 if by_expert else 2),
        "experts.down": mine("down", 0 if by_expert else 1),
    }
    return {name: part.contiguous() for name, part in parts.items()}


def replicated_names(plan: Plan) -> frozenset[str]:
    """Return the parameters all ranks hold alike, whose gradients are the sums of the ranks'."""
    names = {"attention_norm.weight", "experts_norm.weight", "experts.router"}
    if plan.attention != "tp":
        names |= {f"attention.{name}" for name in ("q", "k", "v", "out")}
    return frozenset(names)
