"""Loops over experts as people write them, in two chunks, equal eager bit for bit on two ranks."""

import pytest
import torch
import torch.distributed as dist

from moe_compile.testing.equivalence import differing_tensors
from tests.loop_layers import LOOPS, HandWritten, WhereAndAdd
from tests.slow_parameters import slow_but

WIDTH, HIDDEN, LOCAL, TOP_K = 16, 32, 3, 2
WANTED = ((), (0, LOCAL + 1), (0, 1))
"""Experts that every token chooses, by step: whatever comes; one of each rank, so that others have
no rows; two of the first rank, so that the second receives none."""


def build(style):
    """Return the layer; a token's first numbers say which experts it wants beyond all others."""
    layer = style(WIDTH, HIDDEN, 2 * LOCAL, TOP_K, dist.group.WORLD)
    with torch.no_grad():
        layer.router[: len(WANTED)] = 0
        for place, experts in enumerate(WANTED):
            for rank, expert in enumerate(experts):
                layer.router[place, expert] = 4.0 + rank
    return layer


def steps(rank, tokens):
    """Yield input and output gradient of one step for each of `WANTED`."""
    own = torch.Generator().manual_seed(rank)
    for place, experts in enumerate(WANTED):
        x, gradient = torch.randn(2, tokens[rank], WIDTH, generator=own).bfloat16()
        x[:, : len(WANTED)] = 0
        x[:, place] = 8.0 if experts else 0.0
        yield x, gradient


def run(rank, style, tokens):
    """Return what differs from eager on one rank; `tokens` of the two ranks."""
    torch._dynamo.reset()
    pairs = list(steps(rank, tokens))
    options = {"megamoe.chunks": 2, "megamoe.strict": True}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return differing_tensors(lambda: build(style), pairs, options)


def check(pool, style, tokens):
    for rank, differing in enumerate(pool.run(run, style, tokens)):
        assert not differing, f"rank {rank}: {differing}"


@pytest.mark.parametrize("style", slow_but([HandWritten], LOOPS), ids=lambda s: s.__name__)
def test_a_loop_in_chunks_equals_eager(two_ranks, style):
    check(two_ranks, style, (9, 14))


@pytest.mark.parametrize("style", slow_but([WhereAndAdd], LOOPS), ids=lambda s: s.__name__)
def test_a_loop_on_a_rank_without_tokens_equals_eager(two_ranks, style):
    check(two_ranks, style, (6, 0))
