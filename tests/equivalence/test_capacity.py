"""Experts with a capacity, in chunks and scheduled, equal eager bit for bit, forward and backward.

The auxiliary loss is one of the outputs, and the gradient of the router has a term from it.
"""

import pytest
import torch
import torch.distributed as dist

from moe_compile.report.process_report import REPORT
from moe_compile.testing.equivalence import differing_tensors
from tests.capacity_layers import (
    STYLES,
    BiasedDeepSpeed,
    CapacityOfTensors,
    DeepSpeed,
    GShardEinsum,
    InOne,
    Tutel,
)
from tests.slow_parameters import slow_but

LOCAL, TOP_K, WIDTH, HIDDEN = 4, 2, 32, 64
EVERY = (*STYLES, BiasedDeepSpeed)
SCARCE = 0.75
"""Capacity over what balanced routing needs: some rows are dropped."""


def drawn_step(rank, num_tokens):
    """Return the rows of a rank and the gradient of what the layer makes of them."""
    own = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, WIDTH, generator=own)
    return x, torch.randn(num_tokens * WIDTH + 1, generator=own)


def run_case(rank, style, num_chunks):
    """Return what differs from eager, what became of the region, and how many rows were dropped."""
    torch._dynamo.reset()
    x, gradient = drawn_step(rank, 24)

    def build():
        return InOne(style(WIDTH, HIDDEN, LOCAL, TOP_K, SCARCE, dist.group.WORLD))

    room = build().layer.route(x)[3]
    options = {"megamoe.chunks": num_chunks, "megamoe.strict": True}
    differing = differing_tensors(build, [(x, gradient)], options)
    (region,) = REPORT.compilations[-1].regions
    return differing, (region.num_chunks, region.verdict, region.num_host_reads), (~room).sum()


def check(pool, style, num_chunks):
    found = pool.run(run_case, style, num_chunks)
    for rank, (differing, region, dropped) in enumerate(found):
        assert not differing, f"rank {rank}: {differing}"
        assert region == (num_chunks, "chunked", 0)
        assert dropped > 0


@pytest.mark.parametrize("style", slow_but([Tutel], EVERY), ids=lambda s: s.__name__)
def test_three_chunks_of_four_experts_equal_eager(two_ranks, style):
    check(two_ranks, style, 3)


@pytest.mark.slow
@pytest.mark.parametrize("style", (GShardEinsum, DeepSpeed), ids=lambda s: s.__name__)
def test_four_ranks_equal_eager(four_ranks, style):
    check(four_ranks, style, 2)


def run_steps(rank, tokens):
    """Run a layer with a capacity of tensors in steps of `tokens[step][rank]` rows."""
    torch._dynamo.reset()

    def build():
        return InOne(CapacityOfTensors(WIDTH, HIDDEN, LOCAL, TOP_K, SCARCE, dist.group.WORLD))

    first = len(REPORT.compilations)
    steps = [drawn_step(rank, of_ranks[rank]) for of_ranks in tokens]
    differing = differing_tensors(build, steps, {"megamoe.chunks": 2, "megamoe.strict": True})
    compiled = [[r.verdict for r in c.regions] for c in REPORT.compilations[first:]]
    return differing, compiled


@pytest.mark.slow
def test_a_capacity_of_tensors_stays_in_chunks_where_one_rank_alone_has_other_tokens(two_ranks):
    """torch reads a wrong number of it where sizes are symbols. Eager code would meet chunks."""
    tokens = [(24, 24), (23, 24), (23, 22), (24, 23)]  # five slots each
    found = two_ranks.run(run_steps, tokens)
    for rank, (differing, compiled) in enumerate(found):
        assert not differing, f"rank {rank}: {differing}"
        assert compiled == [["chunked"]] * len({of_ranks[rank] for of_ranks in tokens})
