"""Sums per token as one operator: bitwise where none rounds.

In torchtitan's layer they are within the bound: tests/integration/test_titan_layer.py.
"""

import pytest
import torch

from moe_compile.testing.equivalence import differing_tensors
from tests.dispatch_layers import (
    ByInverse,
    InOrder,
    InOrderWeighted,
    IntoEmpty,
    SharedInOrder,
    SharedInOrderWeighted,
    SharedOut,
    WeightedInOrder,
)
from tests.equivalence.test_layers import build
from tests.equivalence.test_sums_on_nodes import whole, whole_pairs
from tests.equivalence.test_two_hops import a_case, check
from tests.layers import GroupedExperts
from tests.slow_parameters import exhaustive_but

OPTIONS = {"megamoe.numerics": "bounded", "megamoe.strict": True, "megamoe.codegen": "fx"}
CASES = (
    (InOrderWeighted, 2),
    (InOrderWeighted, 1),
    (InOrder, 2),
    (IntoEmpty, 1),
    (WeightedInOrder, 3),
    (ByInverse, 2),
    (SharedInOrder, 2),
    (SharedInOrderWeighted, 2),
)
SLOW = ((IntoEmpty, 1), (WeightedInOrder, 3), (SharedInOrder, 2))


def differing(rank, case, style, chunks):
    torch._dynamo.reset()
    options = {**OPTIONS, "megamoe.chunks": chunks}
    layer = whole(style)
    return differing_tensors(lambda: build(case, layer), whole_pairs(case, rank), options)


@pytest.mark.parametrize(("style", "chunks"), exhaustive_but(SLOW, CASES, CASES[:1]))
def test_sums_that_do_not_round_are_equal(two_ranks, style, chunks):
    """Output, gradients of tokens, of weights of rows and of experts; other tokens in each step."""
    dtype = torch.float32 if issubclass(style, InOrderWeighted) else torch.float64
    tokens = ((9, 14), (4, 0))
    if (style, chunks) == CASES[0]:  # which every run tries: one step, and a rank without tokens
        tokens = ((9, 0),)
    elif style is IntoEmpty:  # eagerly a rank without rows writes none, and sends no message back
        tokens = ((9, 14), (16, 3))
    elif issubclass(style, SharedOut):
        tokens = ((8, 8),)
    case = a_case(GroupedExperts, *tokens, dtype=dtype, hidden=32, top_k=3, num_experts=8)
    check(two_ranks.run(differing, case, style, chunks))
