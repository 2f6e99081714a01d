"""Ranks that compiled different orders of collectives stop; ranks that agree go on."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_compile.errors import RankDisagreement
from moe_compile.ops.launch_records import executed_records
from moe_compile.testing.rank_pool import RankFailure, RankPool
from passes.chunk_regions import ChunkRegions
from tests.layers import GroupedExperts

OPTIONS = {"megamoe.codegen": "fx", "megamoe.chunks": 2}


def compiled_layer(**more):
    torch._dynamo.reset()
    layer = GroupedExperts(16, 24, 8, 2, dist.group.WORLD)
    options = {**OPTIONS, **{f"megamoe.{name}": value for name, value in more.items()}}
    return torch.compile(layer, backend="megamoe", fullgraph=True, options=options)


def step(layer, tokens):
    x = torch.randn(tokens, 16, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()


def fail_on_rank_one(rank):
    """Run with a pass that raises on rank 1 only; return what each rank saw."""
    with contextlib.ExitStack() as stack:
        if rank == 1:
            failing = mock.Mock(side_effect=RuntimeError("out of luck"))
            stack.enter_context(mock.patch.object(ChunkRegions, "run", failing))
        try:
            step(compiled_layer(), 8)
        except RankDisagreement as error:
            return str(error)
    return "ran"


def test_one_rank_whose_pass_failed_stops_all_and_is_named():
    with RankPool(2, timeout_s=30) as pool:
        first, second = pool.run(fail_on_rank_one)
    assert "ranks [1] compiled another order of collectives than rank 0" in first
    assert "ranks [0] compiled another order of collectives than rank 1" in second


def recompile_alone(rank):
    """Rank 1 changes its number of tokens, to one as well, and so recompiles; rank 0 does not."""
    layer = compiled_layer()
    before = len(executed_records())
    for tokens in (16, 16 + 4 * rank, 16 - 15 * rank, 16):
        step(layer, tokens)
    return [(r["phase"], r["digests"]) for r in executed_records()[before:]]


def test_a_rank_that_recompiles_alone_keeps_the_order(two_ranks):
    first, second = two_ranks.run(recompile_alone)
    assert len(first) < len(second)  # rank 1 did compile more graphs
    for phase in ("forward", "backward"):
        digests = [d for p, d in (*first, *second) if p == phase]
        assert all(d == digests[0] for d in digests)


def gather_other_tokens(rank):
    """Promise equal tokens and have others on each rank; return what the rank saw."""
    options = {"dispatch": "all_gather", "equal_tokens": True, "dispatch_padding": "worst"}
    layer = compiled_layer(**options)
    try:
        step(layer, 8 + 4 * rank)
    except RankDisagreement as error:
        return str(error)
    return "ran"


def test_a_broken_promise_of_equal_tokens_stops_all_before_anything_is_sent():
    with RankPool(2, timeout_s=30) as pool:
        seen = pool.run(gather_other_tokens)
    assert all("they have different numbers of tokens" in said for said in seen)


def raise_on(rank, unlucky):
    if rank == unlucky:
        raise ValueError(f"from rank {rank}")


def test_the_pool_names_the_rank_that_failed(two_ranks):
    with pytest.raises(RankFailure, match=r"rank 1:\n(.|\n)*from rank 1"):
        two_ranks.run(raise_on, 1)
