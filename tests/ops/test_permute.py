"""permute_rows equals its reference, forward and backward."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compile.ops.permute import PERMUTE_ROWS


@given(
    order=st.integers(0, 9).flatmap(lambda n: st.permutations(range(n))), seed=st.integers(0, 99)
)
@settings(deadline=None)
def test_values_and_gradients_equal_the_references(order, seed):
    order = torch.tensor(order, dtype=torch.int64)
    inverse = torch.argsort(order)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(len(order), 3, generator=generator)
    gradient = torch.randn(len(order), 3, generator=generator)
    found = []
    for function in (PERMUTE_ROWS, lambda rows, order, _: rows[order]):
        x = rows.clone().requires_grad_()
        out = function(x, order, inverse)
        out.backward(gradient)
        found.append((out, x.grad))
    (ours, ours_grad), (expected, expected_grad) = found
    assert torch.equal(ours, expected)
    assert torch.equal(ours_grad, expected_grad)
