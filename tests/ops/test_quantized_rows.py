"""Messages of rows: the format, byte by byte, and the error bound that follows from it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compile.ops.quantized_rows import (
    GATHER_QUANTIZE_PACK,
    GATHER_ROWS,
    REFERENCES,
    UNPACK_DEQUANTIZE,
    UNPACK_DEQUANTIZE_PERMUTE,
)
from moe_compile.ops.wire_format import (
    AMAX_MIN,
    BLOCK,
    E4M3_MAX,
    num_blocks,
    payload_bytes,
    row_bytes,
)

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = st.one_of(st.integers(1, 300), st.sampled_from([128, 256, 384, 512, 1024]))
BF16_MAX = torch.finfo(torch.bfloat16).max
BF16_TINY = 2.0**-133  # least subnormal


def there_and_back(rows, index=None):
    return UNPACK_DEQUANTIZE(GATHER_QUANTIZE_PACK(rows, index), rows.shape[1], rows.dtype)


def blocks(rows):
    return rows.float().split(BLOCK, dim=1)


def assert_within_bound(rows, again):
    """Bound of `wire_format.error_bound`, plus half a unit of the last place of the output."""
    half_unit = torch.finfo(rows.dtype).eps / 2
    for x, y in zip(blocks(rows), blocks(again), strict=True):
        scale = x.abs().amax(1, keepdim=True).clamp_min(AMAX_MIN).double() / E4M3_MAX
        x, y = x.double(), y.double()
        bound = torch.maximum(2.0**-4 * x.abs(), 2.0**-10 * scale) + 2.0**-20 * x.abs()
        rounding = half_unit * y.abs() + torch.finfo(rows.dtype).smallest_normal * half_unit
        assert ((x - y).abs() <= bound + rounding).all()


def test_the_worked_example_of_the_format():
    message = GATHER_QUANTIZE_PACK(torch.tensor([[1.0, -0.5]]))
    assert message.tolist()[0][:4] == [0x7E, 0xF6, 0, 0]
    assert message[:, 4:].contiguous().view(torch.float32).item() == pytest.approx(1 / 448)


@given(rows=st.integers(0, 5), width=WIDTHS, dtype=st.sampled_from(FLOATS), seed=st.integers(0, 99))
@settings(deadline=None)
def test_every_byte_of_a_row_is_where_the_format_says(rows, width, dtype, seed):
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    message = GATHER_QUANTIZE_PACK(x)
    assert message.shape == (rows, row_bytes(width)) and message.dtype is torch.uint8
    start = payload_bytes(width)
    assert not message[:, width:start].any()
    scales = message[:, start:].contiguous().view(torch.float32)
    assert scales.shape == (rows, num_blocks(width))
    for b, block in enumerate(blocks(x)):
        amax = block.abs().amax(1).clamp_min(AMAX_MIN)
        assert torch.equal(scales[:, b], amax / E4M3_MAX)
        payload = message[:, b * BLOCK : b * BLOCK + block.shape[1]]
        expected = (block * (E4M3_MAX / amax)[:, None]).to(torch.float8_e4m3fn)
        assert torch.equal(payload, expected.view(torch.uint8))


@given(
    width=WIDTHS,
    dtype=st.sampled_from(FLOATS),
    exponents=st.tuples(st.integers(-40, 15), st.integers(0, 30)),
    seed=st.integers(0, 999),
)
@settings(deadline=None)
def test_no_column_is_off_by_more_than_the_bound(width, dtype, exponents, seed):
    low, spread = exponents
    own = torch.Generator().manual_seed(seed)
    powers = torch.randint(low, max(low + 1, min(low + spread, 15)), (4, width), generator=own)
    rows = (torch.randn(4, width, generator=own) * 2.0**powers).to(dtype)
    rows = rows.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    assert_within_bound(rows, there_and_back(rows))


@given(exponent=st.integers(-133, 127), width=WIDTHS, seed=st.integers(0, 99))
@settings(deadline=None)
def test_the_full_range_of_bf16_survives(exponent, width, seed):
    own = torch.Generator().manual_seed(seed)
    rows = (torch.rand(3, width, generator=own, dtype=torch.float64) + 0.5) * 2.0**exponent
    rows = rows.clamp(-BF16_MAX, BF16_MAX).bfloat16()
    again = there_and_back(rows)
    assert torch.isfinite(again).all()
    assert_within_bound(rows, again)


@pytest.mark.parametrize("value", [BF16_MAX, -BF16_MAX, BF16_TINY, -BF16_TINY, 0.0, 2.0**-126])
def test_extreme_values_come_back_as_they_were(value):
    rows = torch.full((2, 130), value, dtype=torch.bfloat16)
    rows[1, ::2] = 0
    again = there_and_back(rows)
    assert torch.equal(again, rows)


def test_zeros_of_both_signs_come_back_as_zeros():
    rows = torch.tensor([[0.0, -0.0] * 100])
    assert torch.equal(there_and_back(rows), torch.zeros(1, 200))


@given(outlier=st.floats(2.0, 2.0**60), place=st.integers(0, 127))
@settings(deadline=None)
def test_one_outlier_spoils_its_own_block_only(outlier, place):
    rows = torch.ones(1, 384, dtype=torch.float32)
    rows[0, BLOCK + place] = outlier
    again = there_and_back(rows)
    assert torch.equal(again[:, :BLOCK], rows[:, :BLOCK])
    assert torch.equal(again[:, 2 * BLOCK :], rows[:, 2 * BLOCK :])
    assert again[0, BLOCK + place] == pytest.approx(outlier, rel=1e-6)
    assert_within_bound(rows, again)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_with_an_infinity_or_nan_comes_out_as_nan(bad):
    rows = torch.ones(2, 300, dtype=torch.bfloat16)
    rows[0, 130] = bad
    again = there_and_back(rows)
    assert again[0, 128:256].isnan().all()
    assert torch.isfinite(again[0, :128]).all() and torch.isfinite(again[0, 256:]).all()
    assert torch.equal(again[1], rows[1])


@given(seed=st.integers(0, 99), width=WIDTHS, rows=st.integers(1, 6), picks=st.integers(0, 9))
@settings(deadline=None)
def test_picked_rows_are_those_of_a_gather_before_or_after(seed, width, rows, picks):
    own = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=own).bfloat16()
    index = torch.randint(0, rows, (picks,), generator=own)
    message = GATHER_QUANTIZE_PACK(x)
    assert torch.equal(GATHER_QUANTIZE_PACK(x, index), GATHER_QUANTIZE_PACK(x[index]))
    assert torch.equal(GATHER_QUANTIZE_PACK(x, index), message[index])
    permuted = UNPACK_DEQUANTIZE_PERMUTE(message, index, width, torch.bfloat16)
    assert torch.equal(permuted, UNPACK_DEQUANTIZE(message, width, torch.bfloat16)[index])
    assert torch.equal(GATHER_ROWS(x, index), x[index])


def test_a_row_takes_at_most_52_hundredths_of_bf16_from_1024_columns_on():
    assert max(row_bytes(width) / (2 * width) for width in range(1024, 20000)) <= 0.52


def test_gaussian_rows_come_back_with_31_decibels():
    rows = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0)).bfloat16()
    error = there_and_back(rows).double() - rows.double()
    signal_to_noise = 10 * math.log10(rows.double().square().mean() / error.square().mean())
    assert signal_to_noise >= 31


def samples():
    rows = torch.randn(5, 200, dtype=torch.bfloat16)
    index = torch.tensor([4, 0, 0])
    message = GATHER_QUANTIZE_PACK(rows)
    row = (200, torch.bfloat16)
    return {
        GATHER_QUANTIZE_PACK: [(rows,), (rows, index), (rows.requires_grad_(), index), (rows[:0],)],
        UNPACK_DEQUANTIZE: [(message, *row), (message[:0], *row)],
        UNPACK_DEQUANTIZE_PERMUTE: [(message, index, *row)],
        GATHER_ROWS: [(rows.detach(), index), (rows.detach(), index[:0])],
    }


@pytest.mark.parametrize("op", REFERENCES, ids=str)
def test_operators_are_as_torch_wants_them(op):
    for sample in samples()[op]:
        torch.library.opcheck(op, sample)


@pytest.mark.parametrize(
    ("op", "wrong", "says"),
    [
        (GATHER_QUANTIZE_PACK, (torch.zeros(3, 4, dtype=torch.int32),), "floating-point"),
        (GATHER_QUANTIZE_PACK, (torch.zeros(3),), r"\[S, D\]"),
        (UNPACK_DEQUANTIZE, (torch.zeros(3, 9, dtype=torch.uint8), 8, torch.float32), "12 bytes"),
        (UNPACK_DEQUANTIZE, (torch.zeros(3, 12), 8, torch.float32), "uint8"),
    ],
)
def test_what_is_no_row_or_no_message_is_refused(op, wrong, says):
    with pytest.raises(ValueError, match=says):
        op(*wrong)
