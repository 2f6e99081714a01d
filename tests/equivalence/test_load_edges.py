"""Chunks whose experts follow from the rows they have equal eager bit for bit."""

import pytest
import torch

from moe_compile.testing.equivalence import differing_tensors
from moe_compile.testing.strategies import RoutingPattern
from tests.equivalence.test_layers import build, inputs, one_case
from tests.layers import GroupedExperts
from tests.slow_parameters import slow_but


def run_case(rank, case, style, codegen="fx", edges="load"):
    torch._dynamo.reset()
    options = {
        "megamoe.chunks": case.chunks,
        "megamoe.chunk_edges": edges,
        "megamoe.strict": True,
        "megamoe.codegen": codegen,
    }
    return differing_tensors(lambda: build(case, style), inputs(case, rank), options)


def check(pool, case, style):
    for rank, differing in enumerate(pool.run(run_case, case, style)):
        assert not differing, f"rank {rank}: {differing}"


def case_of(style, *tokens, **changes):
    """Return a case of five experts a rank in three chunks."""
    return one_case(style, *tokens, num_experts=5 * len(tokens[0]), chunks=3, **changes)


SHOWN = (RoutingPattern.FIRST_RANK,)
"""A rank without any rows."""


@pytest.mark.parametrize("routing", slow_but(SHOWN, list(RoutingPattern)))
def test_layers_in_chunks_by_load_equal_eager(two_devices, routing):
    check(two_devices, case_of(GroupedExperts, (9, 14), (16, 3), routing=routing), GroupedExperts)


@pytest.mark.slow
@pytest.mark.parametrize("routing", [RoutingPattern.BALANCED, RoutingPattern.SKEWED])
def test_four_ranks_agree_on_chunks_by_load(four_ranks, routing):
    check(four_ranks, case_of(GroupedExperts, (5, 11, 1, 8), routing=routing), GroupedExperts)


@pytest.mark.slow
def test_generated_code_is_as_far_from_eager_as_that_of_even_chunks(two_ranks):
    """Inductor rounds otherwise than eager, and by load as it does in even chunks."""
    case = case_of(GroupedExperts, (9, 14), (16, 3), routing=RoutingPattern.SKEWED)
    by_load, even = (
        two_ranks.run(run_case, case, GroupedExperts, "inductor", edges)
        for edges in ("load", "even")
    )
    assert by_load == even
