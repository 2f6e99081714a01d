"""Chunks of tokens: exact where sums are, within the stated bound where they round."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.layers import GroupedExperts, LoopExperts, SortedChunks
from tests.quantized_layers import quantized_eagerly
from tests.slow_parameters import slow_but


class WholeNumbers(LoopExperts):
    """Weights, scores and experts of small integers in float64: no sum rounds, in any order."""

    def make_experts(self, width, hidden, rand):
        for name, *shape in (("w1", width, hidden), ("w3", width, hidden), ("w2", hidden, width)):
            weight = (rand(self.local, *shape) * 2).round().clamp(-3, 3)
            setattr(self, name, nn.Parameter(weight))

    def route(self, x):
        _, chosen = super().route(x)
        return torch.ones(chosen.shape, dtype=x.dtype, device=x.device), chosen

    def expert(self, x, e):
        return (torch.relu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e]


def options(chunks, wires=("same", "same")):
    return {
        "megamoe.chunks": chunks,
        "megamoe.chunk_by": "tokens",
        "megamoe.strict": True,
        "megamoe.codegen": "fx",
        "megamoe.dispatch_wire": wires[0],
        "megamoe.combine_wire": wires[1],
    }


TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 96, 128, 64, 2, 2  # one local expert
ROUNDING = 2.0**-8


def distances(rank, style, chunks, wires, dtype=torch.bfloat16):
    """Return |chunked - eager| / |eager| of the output and of every gradient, 2-norms."""
    torch._dynamo.reset()
    own = torch.Generator().manual_seed(rank)
    x, gradient = (torch.randn(TOKENS, WIDTH, generator=own).to(dtype) for _ in range(2))
    results = []
    for compiled in (False, True):
        kind = style if compiled else quantized_eagerly(style, *wires)
        layer = kind(WIDTH, HIDDEN, EXPERTS, TOP_K, dist.group.WORLD, dtype)
        run = (
            torch.compile(layer, backend="megamoe", fullgraph=True, options=options(chunks, wires))
            if compiled
            else layer
        )
        rows = x.clone().requires_grad_()
        output = run(rows)
        output.backward(gradient)
        results.append([output.detach(), rows.grad, *(p.grad for p in layer.parameters())])
    pairs = ((a.double(), b.double()) for a, b in zip(*results, strict=True))
    return [float((a - b).norm() / a.norm()) for a, b in pairs]


def check_distances(pool, style, wire):
    chunks = 3
    for measured in pool.run(distances, style, chunks, (wire, wire)):
        assert max(measured) <= chunks * ROUNDING, measured
        if wire == "same":  # in two bytes weights' gradients alone round otherwise
            output, tokens, *_ = measured
            assert output == tokens == 0


@pytest.mark.parametrize(
    ("style", "wire"),
    slow_but([(SortedChunks, "same")], [(SortedChunks, "same"), (GroupedExperts, "fp8")]),
)
def test_one_local_expert_in_chunks_of_tokens_is_off_by_roundings(mirrored_ranks, style, wire):
    check_distances(mirrored_ranks, style, wire)


def test_in_eight_bytes_all_is_off_by_roundings_of_products(mirrored_ranks):
    """A product of K numbers is off by at most K eps; a CPU rounds it by the number of rows."""
    settings = (LoopExperts, 3, ("same", "same"), torch.float64)
    for measured in mirrored_ranks.run(distances, *settings):
        assert max(measured) <= WIDTH * torch.finfo(torch.float64).eps
