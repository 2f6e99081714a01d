"""Chunks of tokens: exact where sums are, within the stated bound where they round."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moe_compile.testing.equivalence import differing_tensors
from moe_compile.testing.strategies import moe_cases
from tests.equivalence.test_layers import build, examples, inputs
from tests.layers import (
    GatheredCounts,
    GroupedExperts,
    LoopExperts,
    SortedChunks,
)
from tests.quantized_layers import quantized_eagerly

CHUNKS = st.integers(2, 4)


class WholeNumbers(LoopExperts):
    """Weights, scores and experts of small integers in float64: no sum rounds, in any order."""

    def make_experts(self, width, hidden, rand):
        for name, *shape in (("w1", width, hidden), ("w3", width, hidden), ("w2", hidden, width)):
            weight = (rand(self.local, *shape) * 2).round().clamp(-3, 3)
            setattr(self, name, nn.Parameter(weight))

    def route(self, x):
        _, chosen = super().route(x)
        return torch.ones(chosen.shape, dtype=x.dtype), chosen

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


def differing_sums(rank, case, chunks):
    torch._dynamo.reset()
    whole = [tuple((t * 2).round() for t in pair) for pair in inputs(case, rank)]
    return differing_tensors(lambda: build(case, WholeNumbers), whole, options(chunks))


def check(pool, case, chunks):
    for rank, differing in enumerate(pool.run(differing_sums, case, chunks)):
        assert not differing, f"rank {rank}: {differing}"


@given(data=st.data(), chunks=CHUNKS)
@examples(2)
def test_sums_that_do_not_round_are_the_same_in_any_number_of_chunks(two_ranks, data, chunks):
    check(two_ranks, data.draw(moe_cases(2, (torch.float64,))), chunks)


@given(data=st.data(), chunks=CHUNKS)
@examples(1)
def test_four_ranks_agree_on_which_rows_a_chunk_takes(four_ranks, data, chunks):
    check(four_ranks, data.draw(moe_cases(4, (torch.float64,))), chunks)


TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 96, 128, 64, 2, 2  # one local expert
ROUNDING = 2.0**-8


def distances(rank, style, chunks, wires):
    """Return |chunked - eager| / |eager| of the output and of every gradient, 2-norms."""
    torch._dynamo.reset()
    own = torch.Generator().manual_seed(rank)
    x, gradient = (torch.randn(TOKENS, WIDTH, generator=own).bfloat16() for _ in range(2))
    results = []
    for compiled in (False, True):
        kind = style if compiled else quantized_eagerly(style, *wires)
        layer = kind(WIDTH, HIDDEN, EXPERTS, TOP_K, dist.group.WORLD)
        run = (
            torch.compile(layer, backend="megamoe", fullgraph=True, options=options(chunks, wires))
            if compiled
            else layer
        )
        rows = x.clone().requires_grad_()
        output = run(rows)
        output.backward(gradient)
        results.append([output.detach(), rows.grad, *(p.grad for p in layer.parameters())])
    return [float((a - b).float().norm() / a.float().norm()) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("wires", [("same", "same"), ("fp8", "fp8")], ids=["same", "fp8"])
@pytest.mark.parametrize("style", [GroupedExperts, SortedChunks, GatheredCounts])
def test_one_local_expert_in_chunks_of_tokens_is_off_by_roundings(two_ranks, style, wires):
    chunks = 3
    for measured in two_ranks.run(distances, style, chunks, wires):
        assert max(measured) <= chunks * ROUNDING, measured


@pytest.mark.slow
@given(data=st.data(), chunks=st.integers(1, 6))
@examples(30)
def test_many_layers_whose_sums_do_not_round_are_the_same(two_ranks, data, chunks):
    check(two_ranks, data.draw(moe_cases(2, (torch.float64,))), chunks)
