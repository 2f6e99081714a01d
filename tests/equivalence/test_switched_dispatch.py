"""Tokens gathered instead of rows exchanged: equal to eager where sums have two addends at most."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_compile.testing.equivalence import differing_tensors
from moe_compile.testing.strategies import moe_cases
from tests.equivalence.test_layers import build, dtypes, examples, inputs
from tests.layers import STYLES

PADDING = st.sampled_from(["exact", "worst"])


def equal_tokens(case, top_k=2):
    """Return `case` with as many tokens on every rank, in each step."""
    return dataclasses.replace(
        case,
        top_k=min(top_k, case.num_experts),
        tokens=tuple((step[0],) * case.num_ranks for step in case.tokens),
    )


def options(padding, **more):
    return {
        "megamoe.dispatch": "all_gather",
        "megamoe.dispatch_padding": padding,
        "megamoe.equal_tokens": True,
        "megamoe.strict": True,
        **{f"megamoe.{name}": value for name, value in more.items()},
    }


def run_case(rank, case, style, settings):
    torch._dynamo.reset()
    return differing_tensors(lambda: build(case, style), inputs(case, rank), settings)


def check(pool, case, style, settings):
    for rank, differing in enumerate(pool.run(run_case, case, style, settings)):
        assert not differing, f"rank {rank}: {differing}"


@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.__name__)
@given(data=st.data(), padding=PADDING)
@examples(4)
def test_two_rows_a_token_change_no_bit_on_two_ranks(two_ranks, style, data, padding):
    case = equal_tokens(data.draw(moe_cases(2, dtypes(style))), data.draw(st.integers(1, 2)))
    check(two_ranks, case, style, options(padding))
