"""What the kernels must compute, as properties; `python -m` runs them in Triton's interpreter.

The interpreter must be chosen before triton is imported, so it needs a process of its own. Its
casts to bf16 truncate and those to float8 round halves up; torch's take their place there, so
what a GPU's casts do is checked on a GPU alone.
"""

import os
import struct

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from moe_compile.ops.kernels.gather_rows import gather_rows
from moe_compile.ops.kernels.pack_rows import gather_quantize_pack, unpack_dequantize
from moe_compile.ops.kernels.sum_rows import dot_rows, sum_rows
from moe_compile.ops.row_sums import dots_of_places, sum_of_places, wide_type
from moe_compile.ops.wire_format import (
    AMAX_MIN,
    BLOCK,
    E4M3_MAX,
    SCALE_BYTES,
    num_blocks,
    payload_bytes,
    row_bytes,
)

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WIDTHS = st.integers(1, 700) | st.sampled_from([128, 256, 512, 640, 1024])
CASTS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
"""Types by the names Triton gives them."""
NUM_ROWS = st.integers(0, 40)
SEEDS = st.integers(0, 2**31)
EXAMPLES = settings(max_examples=40 if DEVICE == "cpu" else 100, deadline=None)
INDICES = st.sampled_from([None, torch.int32, torch.int64])


def random_bytes(num_rows, num_bytes, generator):
    return torch.randint(0, 256, (num_rows, num_bytes), dtype=torch.uint8, generator=generator)


def rows_of_all_kinds(num_rows, width, dtype, generator):
    """Rows whose blocks are each of one kind: usual, zero, tiny, an outlier, any bits at all."""
    shape = (num_rows, num_blocks(width), BLOCK)
    usual = torch.randn(shape, generator=generator)
    bits = random_bytes(num_rows, shape[1] * BLOCK * dtype.itemsize, generator).view(dtype)
    outlier = torch.where(torch.arange(BLOCK) == BLOCK // 3, 1e4, 1e-3) * usual
    finite = bits.view(shape).float().nan_to_num(1.0, 2.0, -2.0)
    tiny = finite.abs().clamp_max(torch.finfo(dtype).tiny)
    infinite = torch.where(usual > 2.5, torch.inf, usual)
    kinds = [usual, 0 * usual, tiny, outlier, finite, infinite, bits.view(shape).float()]
    kind = torch.randint(0, len(kinds), (*shape[:2], 1), generator=generator)
    mixed = sum(torch.where(kind == i, rows, 0) for i, rows in enumerate(kinds))
    return mixed.to(dtype).flatten(1)[:, :width].contiguous()


def draw_index(kind, num_rows, num_sources, generator):
    if kind is None:
        return None
    return torch.randint(-num_sources, num_sources, (num_rows,), dtype=kind, generator=generator)


def pick(rows, index):
    return rows if index is None else rows[index.long()]


def to_device(tensor):
    return None if tensor is None else tensor.to(DEVICE)


def pack_reference(rows):
    """Return messages `[R, row_bytes(D)]` of rows `[R, D]`, by the rules of the format.

    Tensors divide tensors: number / tensor multiplies by a rounded reciprocal in torch, as does
    tensor / number on a GPU, and ties of the payload then fall to the other side.
    """
    num_rows, width = rows.shape
    x = torch.zeros(num_rows, num_blocks(width), BLOCK)
    x.flatten(1)[:, :width] = rows.float()
    largest = x.abs().amax(-1).clamp_min(AMAX_MIN)
    top = torch.full(largest.shape, E4M3_MAX)
    payload = (x * (top / largest)[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.div(largest, top, out=torch.empty(largest.shape)).view(torch.uint8)
    return torch.cat([payload.flatten(1)[:, : payload_bytes(width)], scales], 1)


def unpack_reference(messages, width, dtype):
    """Return rows `[R, width]` of messages `[R, row_bytes(width)]`."""
    scales = messages[:, payload_bytes(width) :].contiguous().view(torch.float32)
    payload = messages[:, :width].contiguous().view(torch.float8_e4m3fn).float()
    return (payload * scales.repeat_interleave(BLOCK, 1)[:, :width]).to(dtype)


def assert_same_bits_but_any_nan(found, expected):
    bits = BITS[found.element_size()]
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found.view(bits)[~nan], expected.view(bits)[~nan])


@EXAMPLES
@given(NUM_ROWS, st.integers(1, 9), WIDTHS, st.sampled_from(FLOATS), INDICES, SEEDS)
def messages_equal_the_formats_rules(num_rows, num_sources, width, dtype, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    num_sources = num_rows if kind is None else num_sources
    rows = rows_of_all_kinds(num_sources, width, dtype, generator)
    index = draw_index(kind, num_rows, num_sources, generator)
    found = gather_quantize_pack(to_device(rows), to_device(index)).cpu()
    expected = pack_reference(pick(rows, index))
    assert found.shape == (num_rows, row_bytes(width)) and found.dtype == torch.uint8
    values = [unpack_reference(m, width, torch.float32) for m in (found, expected)]
    assert_same_bits_but_any_nan(*values)
    # a block that is not finite is NaN as a whole; which NaN is left open
    may_differ = torch.zeros(found.shape, dtype=torch.bool)
    may_differ[:, :width] = values[1].isnan()
    may_differ[:, payload_bytes(width) :] = (
        values[1].isnan()[:, ::BLOCK].repeat_interleave(SCALE_BYTES, 1)
    )
    assert torch.equal(found[~may_differ], expected[~may_differ])


@EXAMPLES
@given(
    NUM_ROWS, st.integers(1, 9), WIDTHS, st.sampled_from(FLOATS), INDICES, st.integers(0, 3), SEEDS
)
def rows_equal_payload_times_scale(num_rows, num_messages, width, dtype, kind, skipped, seed):
    """Of any bytes at all; the first messages are left out, so others begin between 16 bytes."""
    generator = torch.Generator().manual_seed(seed)
    num_messages = num_rows if kind is None else num_messages
    messages = random_bytes(skipped + num_messages, row_bytes(width), generator)
    index = draw_index(kind, num_rows, num_messages, generator)
    found = unpack_dequantize(to_device(messages)[skipped:], to_device(index), width, dtype).cpu()
    expected = unpack_reference(pick(messages[skipped:], index), width, dtype)
    assert_same_bits_but_any_nan(found, expected)


@EXAMPLES
@given(
    NUM_ROWS, st.integers(1, 9), WIDTHS, st.sampled_from(list(BITS)), INDICES.filter(bool),
    st.integers(0, 3), SEEDS,
)  # fmt: skip
def gathered_rows_equal_indexing(num_rows, num_sources, width, size, kind, skipped, seed):
    """The rows begin some elements into their memory, so not every word can hold them."""
    generator = torch.Generator().manual_seed(seed)
    elements = random_bytes(skipped + num_sources * width, size, generator).view(BITS[size])
    rows = elements.flatten()[skipped:].view(num_sources, width)
    index = draw_index(kind, num_rows, num_sources, generator)
    moved = to_device(elements).flatten()[skipped:].view(num_sources, width)
    assert torch.equal(gather_rows(moved, to_device(index)).cpu(), rows[index.long()])


@EXAMPLES
@given(
    st.integers(0, 9), st.integers(0, 9), WIDTHS, st.integers(1, 9), st.sampled_from(FLOATS),
    st.sampled_from(FLOATS), SEEDS,
)  # fmt: skip
def sums_equal_their_reference(number, num_rows, width, most, dtype, to, seed):
    """Of any values at all, by places some of which are -1: all of them where there is no row."""
    generator = torch.Generator().manual_seed(seed)
    rows = rows_of_all_kinds(num_rows, width, dtype, generator)
    places = torch.randint(-1, num_rows, (number, most), generator=generator)
    if not num_rows:
        places.fill_(-1)
    parts = cut(rows, generator)
    found = sum_rows([*map(to_device, parts)], to_device(places), to).cpu()
    assert_same_bits_but_any_nan(found, sum_of_places([rows], places, to))


def cut(rows, generator):
    """Return rows as up to four matrices, some of them without rows."""
    places = torch.randint(0, rows.shape[0] + 1, (seed_of(generator, 4),), generator=generator)
    return rows.tensor_split(places.sort().values.tolist())


def seed_of(generator, most):
    return int(torch.randint(0, most, (), generator=generator))


@EXAMPLES
@given(
    st.integers(0, 9), st.integers(1, 9), WIDTHS, st.integers(1, 9),
    st.sampled_from((*FLOATS, torch.float64)), st.sampled_from((*FLOATS, torch.float64)), SEEDS,
)  # fmt: skip
def weighted_sums_and_their_products_are_close(number, num_rows, width, most, dtype, kind, seed):
    """To formulas in float64, by the bound: a GPU multiplies and adds in one rounding."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, width, generator=generator).to(dtype)
    places = torch.randint(0, num_rows, (number, most), generator=generator)
    weights = torch.randn(number, most, generator=generator).to(kind)
    others = torch.randn(number, width, generator=generator).to(kind)
    parts, at = [*map(to_device, cut(rows, generator))], to_device(places)
    wide = wide_type(dtype, kind)
    sums = sum_rows(parts, at, wide, to_device(weights)).cpu()
    dots = dot_rows(parts, at, to_device(others), wide).cpu()
    assert (sums.dtype, dots.dtype) == (wide, wide)
    taken, by = rows.double()[places], weights.double()[:, :, None]
    with_others, eps = taken * others.double()[:, None], torch.finfo(wide).eps
    for found, terms, dim in ((sums, taken * by, 1), (dots, with_others, 2)):
        error = (found.double() - terms.sum(dim)).abs()
        assert (error <= terms.shape[dim] * eps * terms.abs().sum(dim)).all()


def inputs_need_not_be_contiguous():
    rows = torch.arange(12.0).view(3, 4)[:, ::2].bfloat16()
    index = torch.tensor([2, 0, 1, 0])[::2]
    strided, packed = to_device(rows.repeat_interleave(2, 1))[:, ::2], pack_reference(rows)
    assert not strided.is_contiguous()
    spread = to_device(packed.repeat_interleave(2, 0))[::2]
    places = to_device(torch.tensor([2, 9, 1, 9]))[::2]
    assert torch.equal(gather_quantize_pack(strided, places).cpu(), packed[index])
    assert torch.equal(gather_rows(strided, places).cpu(), rows[index])
    unpacked = unpack_dequantize(spread, places, 2, torch.float32).cpu()
    assert torch.equal(unpacked, unpack_reference(packed[index], 2, torch.float32))
    pairs = to_device(torch.tensor([[2, 9, 1], [-1, 9, 0]]))[:, ::2]
    assert torch.equal(
        sum_rows([strided], pairs, rows.dtype).cpu(),
        sum_of_places([rows], pairs.cpu(), rows.dtype),
    )
    weights, all_there = to_device(torch.ones(2, 4))[:, ::2], pairs.abs()
    assert torch.equal(
        sum_rows([strided], all_there, rows.dtype, weights).cpu(),
        sum_rows([strided], all_there, rows.dtype).cpu(),
    )
    assert torch.equal(
        dot_rows([strided], all_there, strided[:2], torch.float32).cpu(),
        dots_of_places([rows], all_there.cpu(), rows[:2], torch.float32),
    )


def the_formats_worked_example_holds():
    rows = torch.tensor([[1.0, -0.5]])
    packed = gather_quantize_pack(to_device(rows), None)
    scale = list(struct.pack("<f", np.float32(1.0) / np.float32(E4M3_MAX)))
    assert packed.tolist() == [[0x7E, 0xF6, 0, 0, *scale]]
    assert torch.equal(unpack_dequantize(packed, None, 2, torch.float32).cpu(), rows)


PROPERTIES = (
    messages_equal_the_formats_rules,
    rows_equal_payload_times_scale,
    gathered_rows_equal_indexing,
    sums_equal_their_reference,
    weighted_sums_and_their_products_are_close,
    inputs_need_not_be_contiguous,
    the_formats_worked_example_holds,
)


def hold(check):
    """Run `check` with memory that nothing was written to poisoned: bytes left out are found."""
    torch.use_deterministic_algorithms(True)
    try:
        check()
    finally:
        torch.use_deterministic_algorithms(False)


def cast_through_torch(data, source, target, rounding_mode):
    """Stand in for the interpreter's casts of floats. Takes and returns arrays of bits."""
    bits = torch.from_numpy(np.array(data, order="C").view(f"int{source.primitive_bitwidth}"))
    values = bits.view(CASTS[source.name]).to(CASTS[target.name])
    return values.view(BITS[values.element_size()]).numpy()


def hold_in_interpreter(properties):
    interpreter._convert_float = cast_through_torch
    for check in properties:
        hold(check)


if __name__ == "__main__":
    hold_in_interpreter(PROPERTIES)
