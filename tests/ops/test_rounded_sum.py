"""Rounding within a buffer is rounding; a sum of bfloat16 contributions is float32."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_compile.ops.rounded_sum import round_in_place, sum_contributions

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
ODD = [0.0, -0.0, 1e-45, -1.1754942e-38, 1.0, 1.00390625, 1.01171875, 3.3895314e38, -65504.5]


def buffer_of(values):
    return torch.tensor(values, dtype=torch.float32)


@given(values=st.lists(FLOATS | st.sampled_from(ODD), max_size=70), staged=st.integers(0, 9))
def test_rounding_in_place_is_rounding(values, staged):
    buffer = buffer_of(values)
    expected = buffer.to(torch.bfloat16)
    halves = round_in_place(buffer, staged=staged)
    assert torch.equal(halves.rounded.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("length", [1, 65536, 65537, 300_001])
def test_long_buffers_are_rounded_to_their_end(length):
    buffer = torch.randn(length)
    expected = buffer.to(torch.bfloat16)
    assert torch.equal(round_in_place(buffer).rounded, expected)


@given(length=st.integers(0, 40))
def test_the_halves_are_all_of_the_buffer_and_apart(length):
    buffer = torch.randn(length)
    halves = round_in_place(buffer, staged=2)
    expected = halves.rounded.clone()
    halves.free.fill_(7.0)
    assert torch.equal(halves.rounded, expected)
    assert halves.rounded.data_ptr() == buffer.data_ptr()
    assert halves.free.numel() == halves.rounded.numel() == length


@given(ranks=st.integers(1, 7), length=st.integers(1, 20), seed=st.integers(0, 99))
def test_the_sum_is_within_float32s_error_of_the_exact_one(ranks, length, seed):
    torch.manual_seed(seed)
    received = torch.randn(ranks, length).to(torch.bfloat16)
    output = torch.full((length,), 99.0)
    sum_contributions(received.flatten(), output)
    exact = received.double().sum(0)
    bound = 2.0**-24 * ranks * received.double().abs().sum(0)
    assert ((output.double() - exact).abs() <= bound).all()


def test_a_sum_that_bfloat16_could_not_hold_is_kept():
    received = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)
    output = torch.empty(1)
    sum_contributions(received, output)
    assert output.item() == 259.0


def test_the_scale_multiplies_the_sum():
    output = torch.empty(2)
    sum_contributions(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16), output, 0.25)
    assert output.tolist() == [1.0, 1.5]
