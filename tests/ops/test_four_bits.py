"""Numbers of four bits: what a byte holds, both scales, the error, and what stays apart."""

import itertools
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compile.ops.four_bits import (
    BLOCK,
    LEAST_MAXIMUM,
    MAGNITUDES,
    four_bits_of,
    numbers_of,
    quantized_vectors,
    scales_of,
)
from moe_compile.ops.product_formats import ELEMENTS, FORMATS
from moe_compile.ops.scaled_products import QUANTIZE_ROWS, QUANTIZE_WEIGHT, SCALED_GROUPED_MM
from moe_compile.testing.product_errors import product_error_bound

E2M1 = ELEMENTS["e2m1"]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def e4m3(byte):
    """The value of a byte, by the definition of the type."""
    exponent, mantissa = byte >> 3, byte & 7
    if byte == 0x7F:
        return float("nan")
    return mantissa * 2.0**-9 if not exponent else (8 + mantissa) * 2.0 ** (exponent - 10)


def by_hand(payload, scales, width):
    """The numbers that bytes stand for, in Python's arithmetic."""
    blocks = [e4m3(byte) for byte in scales[:-4]]
    (vector,) = struct.unpack("<f", bytes(scales[-4:]))
    nibbles = [n for byte in payload for n in (byte & 15, byte >> 4)][:width]
    return [
        (-1 if code & 8 else 1) * MAGNITUDES[code & 7] * blocks[k // BLOCK] * vector
        for k, code in enumerate(nibbles)
    ]


def dequantized(payload, scales, width):
    return numbers_of(payload, width) * scales_of(scales, width)


def test_the_worked_example():
    payload, scales = quantized_vectors(torch.tensor([[3.0, -1.0]]))
    assert payload.tolist() == [[0xC7]]
    assert e4m3(scales[0, 0].item()) == 448.0
    assert dequantized(payload, scales, 2)[0].tolist() == pytest.approx([3.0, -1.0])


def test_four_bits_are_the_nearest_and_a_tie_is_even():
    ties = [(a + b) / 2 for a, b in itertools.pairwise(MAGNITUDES)]
    evens = [0, 2, 2, 4, 4, 6, 6]
    assert four_bits_of(torch.tensor(ties)).tolist() == evens
    assert four_bits_of(-torch.tensor(ties)).tolist() == [8 + code for code in evens]
    values = 8 * torch.rand(1000, generator=seeded(0))
    found = torch.tensor(MAGNITUDES)[four_bits_of(values).long()]
    nearest = (values[:, None] - torch.tensor(MAGNITUDES)).abs().amin(1)
    assert torch.equal((values - found).abs(), nearest)


def drawn(vectors, width, low, spread, seed):
    """Numbers whose magnitudes go over `spread` powers of two."""
    own = seeded(seed)
    exponents = low + spread * torch.rand(vectors, width, generator=own)
    return torch.randn(vectors, width, generator=own) * torch.exp2(exponents)


@given(
    st.integers(0, 4), st.integers(1, 70), st.integers(-140, 80), st.integers(0, 40),
    st.integers(0, 999),
)  # fmt: skip
@settings(deadline=None)
def test_each_number_is_within_the_bound_of_its_scale(vectors, width, low, spread, seed):
    """By bytes read by hand; float64 counts as exact."""
    values = drawn(vectors, width, low, spread, seed)
    payload, scales = quantized_vectors(values)
    assert payload.shape == (vectors, -(-width // 2))
    assert scales.shape == (vectors, -(-width // BLOCK) + 4)
    assert (payload.dtype, scales.dtype) == (torch.uint8, torch.uint8)
    for row, codes, of in zip(values.double(), payload.tolist(), scales.tolist(), strict=True):
        found = torch.tensor(by_hand(codes, of, width), dtype=torch.float64)
        scale = torch.tensor(by_hand([0x22] * len(codes), of, width), dtype=torch.float64)
        a = row.abs()
        most = torch.maximum(a * E2M1.half_unit, scale * E2M1.half_step)
        most = torch.maximum(most, a - E2M1.largest * scale)
        assert ((found - row).abs() <= most + 2.0**-20 * a).all()
    near = dequantized(payload, scales, width).double()
    hand = [by_hand(c, of, width) for c, of in zip(payload.tolist(), scales.tolist(), strict=True)]
    exact = torch.tensor(hand, dtype=torch.float64).view(vectors, width)
    assert ((near - exact).abs() <= 2.0**-22 * exact.abs() + 2.0**-149).all()


def test_a_block_whose_scale_is_normal_loses_a_quarter_or_a_quarter_of_its_scale():
    """Where a block has a 2**14th of its vector's maximum or more, no more than that."""
    values = drawn(200, 64, 0, 6, seed=3)
    payload, scales = quantized_vectors(values)
    scale, a = scales_of(scales, 64).double(), values.double().abs()
    off = (dequantized(payload, scales, 64).double() - values.double()).abs()
    assert (off <= torch.maximum(a / 4, scale / 4) + 2.0**-20 * a).all()
    assert (off > 0.24 * a).any()


def test_a_vector_has_one_more_scale_of_its_largest_finite_block():
    values = torch.zeros(1, 4 * BLOCK)
    values[0, ::BLOCK] = torch.tensor([6.0, 3.0, 6.0 * 2**-20, torch.inf])
    values[0, 1] = -2.0
    payload, scales = quantized_vectors(values)
    assert [e4m3(byte) for byte in scales[0, :3].tolist()] == [448.0, 224.0, 0.0]
    assert scales[0, :-4].view(torch.float8_e4m3fn).float().isnan().tolist() == [False] * 3 + [True]
    found = dequantized(payload, scales, 4 * BLOCK)[0]
    assert found[:2].tolist() == pytest.approx([6.0, -2.0])
    assert found[BLOCK].item() == pytest.approx(3.0)
    assert not found[2 * BLOCK : 3 * BLOCK].any()
    assert found[3 * BLOCK :].isnan().all()
    assert found[: 3 * BLOCK].isfinite().all()


def test_zeros_have_a_normal_scale_of_their_vector():
    payload, scales = quantized_vectors(torch.zeros(2, BLOCK))
    assert not payload.any()
    assert (scales[:, -4:].contiguous().view(torch.float32) == LEAST_MAXIMUM / 2688).all()
    assert not dequantized(payload, scales, BLOCK).any()


def test_a_row_is_quantised_alike_in_any_chunk():
    """No second scale is of several rows: ranks and chunks need not agree on one."""
    rows = drawn(9, 96, -3, 9, seed=1).bfloat16()
    whole = QUANTIZE_ROWS(rows, "nvfp4", "e2m1")
    for part in (rows[:4], rows[4:5], rows[5:]):
        start = int((rows == part[0]).all(1).nonzero()[0])
        for mine, all_ in zip(QUANTIZE_ROWS(part, "nvfp4", "e2m1"), whole, strict=True):
            expected = all_[start : start + len(part)]
            assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("counts", [(0, 3, 5, 0), (8, 0, 0, 0)])
def test_products_are_those_of_the_bytes_read_by_hand(counts):
    """To products in float64; a weight's vectors are its columns."""
    offs = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows, weight = drawn(9, 96, -3, 9, seed=1).bfloat16(), drawn(4 * 96, 64, -3, 9, seed=2)
    weight = weight.bfloat16().view(4, 96, 64)
    payload, scales = QUANTIZE_ROWS(rows, "nvfp4", "e2m1")
    of, of_scales = QUANTIZE_WEIGHT(weight, "nvfp4")
    assert payload.dtype is of.dtype is torch.float4_e2m1fn_x2
    assert of.shape == (4, 48, 64) and of_scales.shape == (4, 10, 64)
    operands = (payload, scales, of, of_scales)
    found = SCALED_GROUPED_MM(*operands, offs, "nvfp4", torch.float32).double()
    a = [by_hand(*one, 96) for one in zip(read(payload), read(scales), strict=True)]
    start = 0
    for expert, end in enumerate(offs.tolist()):
        columns = zip(read(of[expert].t()), read(of_scales[expert].t()), strict=True)
        b = torch.tensor([by_hand(*one, 96) for one in columns], dtype=torch.float64).t()
        group = torch.tensor(a, dtype=torch.float64)[start:end]
        near = 99 * 2.0**-23 * (group.abs() @ b.abs())
        assert ((found[start:end] - group @ b).abs() <= near).all()
        bound = product_error_bound(rows[start:end], weight[expert], "nvfp4", element="e2m1")
        exact = rows[start:end].double() @ weight[expert].double()
        assert ((found[start:end] - exact).abs() <= bound).all()
        start = end
    assert not found[start:].any()


def read(payload):
    return payload.view(torch.uint8).tolist()


def test_the_worst_numbers_come_near_the_bound():
    """0.75 is half-way between two numbers of four bits, and becomes 1; scales are 1."""
    rows, weight = torch.zeros(1, 48), torch.zeros(48, 1)
    rows[0, 0], weight[16] = 2688.0, 2688.0
    rows[0, 32:46], weight[32:46] = 0.75, 0.75
    rows[0, 46], weight[47] = 6.0, 6.0
    operands = (*QUANTIZE_ROWS(rows, "nvfp4", "e2m1"), *QUANTIZE_WEIGHT(weight[None], "nvfp4"))
    assert scales_of(operands[1], 48)[0, 32:].tolist() == [1.0] * BLOCK
    payload, scales = operands[0].view(torch.uint8), operands[1]
    assert dequantized(payload, scales, 48)[0, 32:46].tolist() == [1.0] * 14
    bound = product_error_bound(rows, weight, "nvfp4", element="e2m1")
    assert 0.6 * bound <= 14 * (1 - 0.75**2) <= bound


def test_the_bound_has_what_is_cut():
    """The second block of the row is so small beside the first that its scale is zero."""
    rows, weight = torch.zeros(1, 32), torch.zeros(32, 32)
    rows[0, 0], rows[0, 16], weight[16] = 2688.0, 6 * 2.0**-11, 1.0
    operands = (*QUANTIZE_ROWS(rows, "nvfp4", "e2m1"), *QUANTIZE_WEIGHT(weight[None], "nvfp4"))
    found = SCALED_GROUPED_MM(*operands, torch.tensor([1]).int(), "nvfp4", torch.float32)
    bound = product_error_bound(rows, weight, "nvfp4", element="e2m1")
    assert not found.any()
    assert ((rows[0, 16] <= bound) & (bound < 2 * rows[0, 16])).all()


def test_what_is_not_finite_stays_in_its_row_or_column():
    rows, weight = drawn(3, 64, 0, 1, 0).bfloat16(), drawn(64, 32, 0, 1, 1).bfloat16()[None]
    rows[1, 20], weight[0, 40, 7] = torch.inf, torch.nan
    operands = (*QUANTIZE_ROWS(rows, "nvfp4", "e2m1"), *QUANTIZE_WEIGHT(weight, "nvfp4"))
    offs = torch.tensor([3], dtype=torch.int32)
    found = SCALED_GROUPED_MM(*operands, offs, "nvfp4", torch.bfloat16)
    expected = torch.zeros(3, 32, dtype=torch.bool)
    expected[1], expected[:, 7] = True, True
    assert torch.equal(found.isnan(), expected)


def test_a_row_takes_nine_sixteenths_of_a_byte_per_number():
    """K / 2 and K / 16 bytes, and four: 0.57 of rows in eight bits with a scale in 128."""
    payload, scales = QUANTIZE_ROWS(torch.ones(1, 7168), "nvfp4", "e2m1")
    assert payload.shape[1] + scales.shape[1] == 7168 * 9 // 16 + 4
    assert FORMATS["nvfp4"].row_scales(7168) == [7168 // 16 + 4]
