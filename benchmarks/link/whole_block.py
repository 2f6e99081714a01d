"""What a block computes, unsharded and in the plainest way: the reference of all its divisions.

Tokens lean towards the experts they are to choose, so that no rounding changes the choice: programs
that round at other places then still compute the same function, and can be compared.

Shapes as in benchmarks/link/block.py; here the sequence is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from benchmarks.link.block import EPSILON
from benchmarks.link.cases import BlockCase

LEAN: Final = 8.0
"""Standard deviations by which a chosen expert's logit exceeds the others', before the norm."""
SPREAD: Final = 0.25
"""Of the leanings of one token, relative: its scores differ."""
HALVINGS: Final = 20
"""Of the interval that holds what tokens like the first rank better by: to a millionth."""


@dataclass(frozen=True, kw_only=True)
class WholeBlock:
    """Weights by name, tokens `[S, B, H]` and the gradient of the last block's output.

    Where there are several blocks all begin with these weights: tokens lean as far in each.
    """

    weights: dict[str, torch.Tensor]
    tokens: torch.Tensor
    grad: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class WholeStep:
    """What one step of the whole block, or of several, computes."""

    out: torch.Tensor
    input_grad: torch.Tensor
    weight_grads: tuple[dict[str, torch.Tensor], ...]
    """Of each block."""


def make_block(case: BlockCase, dtype: torch.dtype) -> WholeBlock:
    """Return the block of `case`, the same on every rank; the router is float32."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def weight(*shape: int) -> torch.Tensor:
        return (normal(*shape) * shape[-2] ** -0.5).to(dtype)

    width, keys = case.width, case.kv_heads * (case.width // case.heads)
    router = normal(width, case.experts) * width**-0.5
    weights = {
        "attention_norm": (1.0 + 0.1 * normal(width)).to(dtype),
        "q": weight(width, width),
        "k": weight(width, keys),
        "v": weight(width, keys),
        "out": weight(width, width),
        "experts_norm": (1.0 + 0.1 * normal(width)).to(dtype),
        "router": router,
        "gate": weight(case.experts, width, case.hidden),
        "up": weight(case.experts, width, case.hidden),
        "down": weight(case.experts, case.hidden, width),
    }
    shape = (case.sequence, case.batch)
    likes = torch.rand(*shape, case.experts, generator=generator)
    chosen = _chosen(likes, case)
    leaning = LEAN * (1.0 + SPREAD * likes) * chosen
    return WholeBlock(
        weights=weights,
        tokens=(normal(*shape, width) + leaning @ router.T).to(dtype),
        grad=normal(*shape, width).to(dtype),
    )


def _chosen(likes: torch.Tensor, case: BlockCase) -> torch.Tensor:
    """Return which experts each token goes to, `[S, B, E]`: those that it likes best.

    All like the experts of the first rank better by as much as gives it its load.
    """
    asked = case.rank_load / case.num_ranks
    first = torch.arange(case.experts) < case.experts // case.num_ranks

    def chosen(more: float) -> torch.Tensor:
        liked = likes + more * first
        return liked >= liked.topk(case.top_k, dim=-1).values[..., -1:]

    if case.rank_load == 1.0:
        return chosen(0.0)
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        more = (low + high) / 2
        share = float(chosen(more)[..., first].sum()) / float(chosen(more).sum())
        low, high = (more, high) if share < asked else (low, more)
    return chosen(high)


def run_reference(case: BlockCase, block: WholeBlock, dtype: torch.dtype) -> WholeStep:
    """Return forward and backward of the block, computed in `dtype`."""
    layers = [
        {name: w.to(dtype, copy=True).requires_grad_() for name, w in block.weights.items()}
        for _ in range(case.blocks)
    ]
    x = tokens = block.tokens.to(dtype, copy=True).requires_grad_()
    for weights in layers:
        x = x + _attention(case, weights, _norm(x, weights["attention_norm"]))
        x = x + _experts(case, weights, _norm(x, weights["experts_norm"]))
    x.backward(block.grad.to(dtype))
    return WholeStep(
        out=x.detach(),
        input_grad=_gradient(tokens),
        weight_grads=tuple({name: _gradient(w) for name, w in layer.items()} for layer in layers),
    )


Weights = Mapping[str, torch.Tensor]


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight


def _attention(case: BlockCase, weights: Weights, x_SBH: torch.Tensor) -> torch.Tensor:
    shared = case.heads // case.kv_heads
    q, k, v = (
        (x_SBH @ weights[name]).unflatten(-1, (-1, case.width // case.heads)).permute(1, 2, 0, 3)
        for name in ("q", "k", "v")
    )
    k, v = (y.repeat_interleave(shared, dim=1) for y in (k, v))
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return heads.permute(2, 0, 1, 3).flatten(2) @ weights["out"]


def _experts(case: BlockCase, weights: Weights, x_SBH: torch.Tensor) -> torch.Tensor:
    """One expert after the other, on all the tokens that chose it."""
    x_TH = x_SBH.flatten(0, 1)
    scores, chosen = torch.softmax(x_TH @ weights["router"], dim=-1).topk(case.top_k, dim=-1)
    out = torch.zeros_like(x_TH)
    for expert in range(case.experts):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up, down = (weights[name][expert] for name in ("gate", "up", "down"))
        rows = x_TH[token]
        done = (F.silu(rows @ gate) * (rows @ up)) @ down
        out = out.index_add(0, token, done * scores[token, place][:, None])
    return out.view_as(x_SBH)


def _gradient(x: torch.Tensor) -> torch.Tensor:
    assert x.grad is not None
    return x.grad
