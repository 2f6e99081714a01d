"""Every style of layer, chunked and scheduled, equals eager bit for bit, forward and backward."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moe_compile.testing.equivalence import differing_tensors
from moe_compile.testing.strategies import MoECase, RoutingPattern, chosen_experts, moe_cases
from tests.layers import STYLES, GroupedExperts, LoopExperts, SegmentStarts
from tests.slow_parameters import exhaustive_but

CHOSEN = (GroupedExperts, LoopExperts, SegmentStarts)
"""What every test run tries: grouped and looped experts, counts as a matrix."""
FLOATS = (torch.float32, torch.bfloat16, torch.float64)


def build(case, style):
    """Return the layer with its routing forced as the case asks."""
    layer = style(
        case.width, case.hidden, case.num_experts, case.top_k, dist.group.WORLD, case.dtype,
        seed=case.seed,
    )  # fmt: skip
    forced = chosen_experts(case)
    with torch.no_grad():
        for place, expert in enumerate(forced):
            layer.router[:, expert] = 4.0 + len(forced) - place
    return layer


def inputs(case, rank):
    """Return one pair of input and output gradient per step, other tokens on every rank."""
    own = torch.Generator().manual_seed(1000 * case.seed + rank)
    pairs = []
    for tokens in case.tokens:
        x = torch.randn(tokens[rank], case.width, generator=own).to(case.dtype)
        gradient = torch.randn(tokens[rank], case.width, generator=own).to(case.dtype)
        pairs.append((x.abs() if chosen_experts(case) else x, gradient))
    return pairs


def run_case(rank, case, style):
    torch._dynamo.reset()
    options = {"megamoe.chunks": case.chunks, "megamoe.strict": True}
    return differing_tensors(lambda: build(case, style), inputs(case, rank), options)


def check(pool, case, style):
    for rank, differing in enumerate(pool.run(run_case, case, style)):
        assert not differing, f"rank {rank}: {differing}"


def dtypes(style):
    return FLOATS if style is LoopExperts else (torch.bfloat16,)  # grouped GEMMs compile in bf16


def examples(count):
    return settings(
        max_examples=count,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )


def one_case(style, *tokens, **changes):
    """Return a case of three local experts in chunks of two and one, each style's of another kind.

    `tokens` holds one tuple per step: tokens by rank. Every fourth style has the same routing.
    """
    place, num_ranks = STYLES.index(style), len(tokens[0])
    hidden = 32 if style is LoopExperts else 24  # a CPU rounds float32 by position but in vectors
    case = MoECase(
        num_ranks=num_ranks, width=16, hidden=hidden, num_experts=3 * num_ranks, top_k=2, chunks=2,
        dtype=dtypes(style)[0], tokens=tokens, seed=place,
        routing=list(RoutingPattern)[place % len(RoutingPattern)],
    )  # fmt: skip
    return dataclasses.replace(case, **changes)


@pytest.mark.parametrize("style", exhaustive_but(CHOSEN[:2], STYLES), ids=lambda s: s.__name__)
@given(data=st.data())
@examples(4)
def test_many_layers_on_two_ranks_equal_eager(two_ranks, style, data):
    check(two_ranks, data.draw(moe_cases(2, dtypes(style))), style)
