"""Experts that pick rows of gathered tokens: in slices they compute what they compute whole."""

import itertools

import pytest
import torch
import torch.distributed as dist

from moe_compile.report.process_report import REPORT
from moe_compile.report.region_reports import AS_WRITTEN
from moe_compile.testing.equivalence import differing_tensors
from tests.picking_layers import STYLES, ByLayers, ByOffsets, Grouped, Real, Searched
from tests.slow_parameters import slow_but

WIDTH, HIDDEN, LOCAL, TOKENS = 16, 32, 2, 24
CASES = [*itertools.product((Searched, ByOffsets), (1, 2), (2, 3), (0, 1000))]
"""Style, experts per token, slices, and how much more the router likes one expert than another:
with 1000 all rows are those of the last experts, and some rank has none."""

OTHERS = [(style, 2, 2, 0) for style in STYLES[2:]]
QUICK = [(Searched, 2, 2, 0)]


def run_case(rank, style, top_k, num_slices, favourite, dtype, local=LOCAL):
    torch._dynamo.reset()
    before = len(REPORT.compilations)
    own = torch.Generator().manual_seed(100 + rank)
    x, gradient = (torch.randint(-2, 3, (TOKENS, WIDTH), generator=own).to(dtype) for _ in "xg")
    differing = differing_tensors(
        lambda: style(WIDTH, HIDDEN, local, top_k, dist.group.WORLD, favourite=favourite).to(dtype),
        [(x, gradient), (gradient, x)],
        {"megamoe.chunks": num_slices, "megamoe.chunk_by": "tokens", "megamoe.strict": True},
    )
    regions = [r for c in REPORT.compilations[before:] for r in c.regions]
    return differing, [(r.verdict, r.num_chunks, r.num_local_experts) for r in regions]


def check(pool, *case, expected):
    for rank, (differing, regions) in enumerate(pool.run(run_case, *case)):
        assert not differing, f"rank {rank}: {differing}"
        assert regions == [expected]


@pytest.mark.parametrize(
    ("style", "top_k", "num_slices", "favourite"),
    slow_but(QUICK, [*CASES, *OTHERS]),
)
def test_slices_have_the_bits_of_the_whole(two_ranks, style, top_k, num_slices, favourite):
    case = style, top_k, num_slices, favourite, torch.float64
    check(two_ranks, *case, expected=("chunked", num_slices, LOCAL))


@pytest.mark.slow
@pytest.mark.parametrize("num_slices", (2, 3))
def test_sums_that_round_are_taken_in_the_order_they_had(two_ranks, num_slices):
    """All of them but products: per token, over ranks, over rows for a weight and a score."""
    check(two_ranks, Real, 2, num_slices, 0, torch.float32, expected=("chunked", num_slices, LOCAL))


@pytest.mark.slow
@pytest.mark.parametrize("favourite", [0, 1000])
def test_groups_of_a_grouped_product_end_where_the_rows_of_a_slice_do(two_ranks, favourite):
    case = Grouped, 2, 2, favourite, torch.bfloat16
    check(two_ranks, *case, expected=("chunked", 2, 1))  # all experts of a rank in one product


@pytest.mark.slow
def test_one_expert_per_rank_is_split_too(two_ranks):
    check(two_ranks, Searched, 1, 4, 0, torch.float64, 1, expected=("chunked", 4, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("style", "dtype"), [(ByLayers, torch.float64), (Real, torch.float32)])
def test_four_ranks_reduce_each_slice_alike(four_ranks, style, dtype):
    """Sums over ranks that round, too: gloo adds up each number in one order."""
    check(four_ranks, style, 2, 2, 0, dtype, expected=("chunked", 2, LOCAL))


def differing_options(rank):
    torch._dynamo.reset()
    before = len(REPORT.compilations)
    own = torch.Generator().manual_seed(rank)
    x, gradient = (torch.randint(-2, 3, (TOKENS, WIDTH), generator=own).double() for _ in "xg")
    differing = differing_tensors(
        lambda: ByOffsets(WIDTH, HIDDEN, LOCAL, 2, dist.group.WORLD).double(),
        [(x, gradient)],
        {"megamoe.chunks": 2, "megamoe.chunk_by": "tokens" if rank else "auto"},
    )
    return differing, {r.verdict for c in REPORT.compilations[before:] for r in c.regions}


@pytest.mark.slow
def test_where_one_rank_alone_makes_slices_all_run_as_written(two_ranks):
    assert two_ranks.run(differing_options) == [([], set()), ([], {AS_WRITTEN})]
