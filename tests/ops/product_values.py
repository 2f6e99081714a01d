"""What the kernels of products must compute; `python -m` runs them in Triton's interpreter."""

import os

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compile.ops.kernels.grouped_product import grouped_product
from moe_compile.ops.kernels.pack_rows import gather_quantize_pack, quantize_blocks
from moe_compile.ops.kernels.product_operands import (
    quantize_squares,
    quantize_whole,
    split_messages,
    zero_rows_behind,
)
from moe_compile.ops.kernels.weight_gradient import columns_by_block, weight_gradient
from moe_compile.ops.product_formats import ELEMENTS, FORMATS, quantized_rows, quantized_weight
from moe_compile.ops.scaled_products import message_rows, scaled_grouped_mm
from moe_compile.ops.weight_gradients import quantize_columns, scaled_weight_gradient
from moe_compile.ops.wire_format import BLOCK, row_bytes
from moe_compile.testing.product_errors import (
    IN_FLOAT32,
    IN_TENSOR_CORES,
    product_error_bound,
    weight_gradient_error_bound,
)
from tests.ops.kernel_values import (
    DEVICE,
    EXAMPLES,
    FLOATS,
    INDICES,
    NUM_ROWS,
    SEEDS,
    WIDTHS,
    assert_same_bits_but_any_nan,
    draw_index,
    hold_in_interpreter,
    random_bytes,
    rows_of_all_kinds,
    to_device,
)

FEW = settings(max_examples=25, deadline=None)
EIGHT_BITS = [name for name, element in ELEMENTS.items() if element.per_byte == 1]
BLOCKWISE, ROWWISE = FORMATS["blockwise"], FORMATS["rowwise"]
UNIT = IN_FLOAT32 if DEVICE == "cpu" else IN_TENSOR_CORES


def assert_same_operand(found, expected):
    """Payloads of eight bits and scales; which NaN a NaN is is left open."""
    payload, scales = (one.cpu() for one in found)
    assert payload.dtype == expected[0].dtype and payload.stride() == expected[0].stride()
    same = payload.view(torch.uint8) == expected[0].view(torch.uint8)
    nan = payload.float().isnan() & expected[0].float().isnan()
    assert (same | nan).all()
    assert_same_bits_but_any_nan(scales, expected[1])


@EXAMPLES
@given(NUM_ROWS, WIDTHS, st.sampled_from(FLOATS), st.sampled_from(BLOCKWISE.elements), SEEDS)
def rows_are_quantised_by_the_formats_rules(num_rows, width, dtype, name, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, element = rows_of_all_kinds(num_rows, width, dtype, generator), ELEMENTS[name]
    found = quantize_blocks(to_device(rows), element)
    assert_same_operand(found, quantized_rows(rows, BLOCKWISE, element))
    found = quantize_whole(to_device(rows), element)
    assert_same_operand(found, quantized_rows(rows, ROWWISE, element))


@FEW
@given(
    st.integers(0, 3), st.integers(1, 300), st.integers(1, 300), st.sampled_from(FLOATS),
    st.sampled_from(["rows", "columns", "neither"]), SEEDS,
)  # fmt: skip
def weights_are_quantised_by_the_formats_rules(experts, width, columns, dtype, runs, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = rows_of_all_kinds(experts * width, columns, dtype, generator)
    weight = moved = weight.view(experts, width, columns)
    if runs == "columns":
        moved = to_device(weight.transpose(1, 2).contiguous()).transpose(1, 2)
    elif runs == "neither":
        moved = to_device(weight.repeat_interleave(2, 2))[:, :, ::2]
    found = quantize_squares(moved.to(DEVICE))
    assert_same_operand(found, quantized_weight(weight, BLOCKWISE))


@EXAMPLES
@given(NUM_ROWS, st.integers(1, 9), WIDTHS, INDICES, SEEDS)
def messages_are_split_byte_for_byte(num_rows, num_messages, width, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    num_messages = num_rows if kind is None else num_messages
    messages = random_bytes(num_messages, row_bytes(width), generator)
    index = draw_index(kind, num_rows, num_messages, generator)
    if index is not None:
        index[::3] += num_messages  # of rows of zeros, but where it counted from the end
    found = split_messages(to_device(messages), to_device(index), width)
    expected = message_rows(messages, index, width)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))


def product(rows, scales, weight, weight_scales, offs, dtype):
    operands = (rows, scales, weight, weight_scales, offs)
    return grouped_product(*(to_device(one) for one in operands), dtype).cpu()


def near_reference(operands, offs, dtype, rows, weight, element="e4m3"):
    """Return the product; assert that it is near its reference and the exact product.

    Each is near the exact product of what was quantised, by the bound; and both are near one
    another by that part of the bound that eight bits have no share in.
    """
    found = product(*operands, offs, dtype)
    expected = scaled_grouped_mm(*operands, offs, "blockwise", dtype)
    assert found.shape == expected.shape and found.dtype == dtype
    assert torch.equal(found.isnan(), expected.isnan())
    start = 0
    for expert, end in enumerate(offs.tolist()):
        group = slice(start, end)
        how = {"element": element, "dtype": dtype}
        bound = product_error_bound(rows[group], weight[expert], "blockwise", unit=UNIT, **how)
        exact = rows[group].double() @ weight[expert].double()
        error = (found[group].double() - exact).abs()
        assert not (error > bound).any()
        most = 1.2 * rows[group].double().abs() @ weight[expert].double().abs()
        sums = 2 * (128 * UNIT + (rows.shape[1] + 3) * IN_FLOAT32) * most
        rounded = torch.finfo(dtype).eps * (expected[group].double().abs() + sums)
        apart = (found[group].double() - expected[group].double()).abs()
        assert not (apart > sums + rounded + 2.0**-100).any()
        start = end
    assert not found[start:].any()
    return found


@FEW
@given(
    st.lists(st.sampled_from([0, 0, 1, 2, 127, 128, 129, 200]), min_size=1, max_size=5),
    st.integers(0, 140), st.integers(1, 400), st.integers(1, 300), st.sampled_from(FLOATS),
    st.sampled_from(BLOCKWISE.elements), SEEDS,
)  # fmt: skip
def products_are_near_their_reference(counts, behind, width, columns, dtype, element, seed):
    generator = torch.Generator().manual_seed(seed)
    offs = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = torch.randn(sum(counts) + behind, width, generator=generator)
    weight = torch.randn(len(counts), width, columns, generator=generator)
    payload, scales = quantized_rows(rows, BLOCKWISE, ELEMENTS[element])
    payload.view(torch.uint8)[sum(counts) :] = 0x7F  # NaN of either type, and never read
    operands = (payload, scales, *quantized_weight(weight, BLOCKWISE))
    near_reference(operands, offs, dtype, rows, weight, element)


def products_of_models_widths_are_near_their_reference():
    for width, columns in ((2048, 192), (2880, 160), (7168, 130), (160, 2880)):
        generator = torch.Generator().manual_seed(width)
        offs = torch.tensor([0, 1, 1, 5, 5], dtype=torch.int32)
        rows = torch.randn(6, width, generator=generator)
        weight = torch.randn(5, width, columns, generator=generator)
        element = ELEMENTS["e4m3"]
        operands = (*quantized_rows(rows, BLOCKWISE, element), *quantized_weight(weight, BLOCKWISE))
        near_reference(operands, offs, torch.bfloat16, rows, weight)


def more_groups_than_tiles_in_turn_are_found():
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 3, (70,), generator=generator)
    offs = counts.cumsum(0).to(torch.int32)
    rows = torch.randn(int(offs[-1]), 40, generator=generator)
    weight = torch.randn(70, 40, 20, generator=generator)
    element = ELEMENTS["e4m3"]
    operands = (*quantized_rows(rows, BLOCKWISE, element), *quantized_weight(weight, BLOCKWISE))
    near_reference(operands, offs, torch.float32, rows, weight)


def what_is_not_finite_stays_in_its_block():
    for bad in (torch.inf, -torch.inf, torch.nan):
        rows = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
        weight = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(2))
        rows[1, 200], weight[1, 3, 250] = bad, bad
        rows[2], rows[3] = 0, 1
        offs, element = torch.tensor([2, 4], dtype=torch.int32), ELEMENTS["e4m3"]
        operands = (*quantized_rows(rows, BLOCKWISE, element), *quantized_weight(weight, BLOCKWISE))
        found = product(*operands, offs, torch.bfloat16)
        expected = scaled_grouped_mm(*operands, offs, "blockwise", torch.bfloat16)
        assert torch.equal(found.isnan(), expected.isnan())
        assert found[1].isnan().all() and found[2:, 128:].isnan().all()
        assert found[0].isfinite().all() and found[2:, :128].isfinite().all()
        assert not found[2, :128].any()


def messages_of_zeros_have_products_of_zero():
    messages = torch.zeros(3, row_bytes(256), dtype=torch.uint8)
    messages[1:2] = gather_quantize_pack(to_device(torch.ones(1, 256)), None).cpu()
    index = torch.tensor([1, -1, 0, 1])
    rows = [one.cpu() for one in split_messages(to_device(messages), to_device(index), 256)]
    weight = quantized_weight(torch.ones(1, 256, 16), BLOCKWISE)
    found = product(*rows, *weight, torch.tensor([4], dtype=torch.int32), torch.float32)
    torch.testing.assert_close(found, torch.tensor([256.0, 0, 0, 256])[:, None].expand(4, 16))


def no_rows_and_no_groups_rows_are_zero():
    for num_rows in (0, 3, 130):
        rows = torch.randn(num_rows, 64)
        operands = quantized_rows(rows, BLOCKWISE, ELEMENTS["e4m3"])
        by = quantized_weight(torch.randn(2, 64, 48), BLOCKWISE)
        found = product(*operands, *by, torch.zeros(2, dtype=torch.int32), torch.bfloat16)
        assert found.shape == (num_rows, 48) and not found.any()


@FEW
@given(st.integers(0, 70), st.integers(0, 70), st.integers(1, 300), st.sampled_from(FLOATS))
def only_rows_behind_the_groups_become_zeros(num_rows, end, columns, dtype):
    end = min(end, num_rows)
    products = torch.ones(num_rows, columns, dtype=dtype).to(DEVICE)
    zero_rows_behind(products, torch.tensor([0, end], dtype=torch.int32).to(DEVICE))
    assert products[:end].all() and not products[end:].any()


COUNTS = st.lists(st.sampled_from([0, 0, 1, 2, 127, 128, 129, 200]), min_size=1, max_size=5)


@FEW
@given(
    COUNTS, st.integers(0, 140), st.integers(1, 300), st.sampled_from(FLOATS),
    st.sampled_from(EIGHT_BITS), SEEDS,
)  # fmt: skip
def columns_are_quantised_by_block(counts, behind, width, dtype, element, seed):
    """Of all kinds of rows in each block; NaN behind the groups is not read."""
    generator = torch.Generator().manual_seed(seed)
    offs = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = rows_of_all_kinds(sum(counts) + behind, width, dtype, generator)
    rows[sum(counts) :] = torch.nan
    found = columns_by_block(to_device(rows), to_device(offs), ELEMENTS[element])
    assert_same_operand(found, quantize_columns(rows, offs, element))


def near_gradients(rows, grads, counts, element, dtype):
    """Assert that the gradient of each group is near its reference and the exact one."""
    offs = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    operands = (*quantize_columns(rows, offs), *quantize_columns(grads, offs, element), offs)
    found = weight_gradient(*(to_device(one) for one in operands), dtype).cpu()
    expected = scaled_weight_gradient(*operands, dtype)
    assert found.shape == expected.shape and found.dtype == dtype
    start = 0
    for group, end in enumerate(offs.tolist()):
        left, right = rows[start:end], grads[start:end]
        how = {"element": element, "dtype": dtype}
        bound = weight_gradient_error_bound(left, right, unit=UNIT, **how)
        exact = left.double().t() @ right.double()
        assert ((found[group].double() - exact).abs() <= bound).all()
        most = 1.2 * left.double().abs().t() @ right.double().abs()
        sums = 2 * (BLOCK * UNIT + (end - start + 3) * IN_FLOAT32) * most
        rounded = torch.finfo(dtype).eps * (expected[group].double().abs() + sums)
        apart = (found[group].double() - expected[group].double()).abs()
        assert (apart <= sums + rounded + 2.0**-100).all()
        start = end


@FEW
@given(
    COUNTS, st.integers(0, 140), st.integers(1, 200), st.integers(1, 200),
    st.sampled_from(FLOATS), st.sampled_from(EIGHT_BITS), SEEDS,
)  # fmt: skip
def gradients_are_near_their_reference(counts, behind, width, columns, dtype, element, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, grads = (
        torch.randn(sum(counts) + behind, size, generator=generator) for size in (width, columns)
    )
    near_gradients(rows, grads, counts, element, dtype)


def gradients_of_models_widths_are_near_their_reference():
    for width, columns in ((2048, 192), (2880, 160), (130, 7168)):
        generator = torch.Generator().manual_seed(width)
        rows, grads = (torch.randn(140, size, generator=generator) for size in (width, columns))
        near_gradients(rows, grads, [0, 1, 0, 134, 5], "e4m3", torch.bfloat16)


def what_is_not_finite_reaches_a_row_or_a_column_of_one_gradient():
    for bad in (torch.inf, -torch.inf, torch.nan):
        generator = torch.Generator().manual_seed(1)
        rows, grads = (torch.randn(300, size, generator=generator) for size in (140, 40))
        rows[200, 137], grads[270, 3] = bad, bad
        offs = torch.tensor([260, 300], dtype=torch.int32)
        operands = (*quantize_columns(rows, offs), *quantize_columns(grads, offs), offs)
        found = weight_gradient(*(to_device(one) for one in operands), torch.bfloat16).cpu()
        expected = torch.zeros(2, 140, 40, dtype=torch.bool)
        expected[0, 137], expected[1, :, 3] = True, True
        assert torch.equal(found.isnan(), expected)


PROPERTIES = (
    columns_are_quantised_by_block,
    gradients_are_near_their_reference,
    gradients_of_models_widths_are_near_their_reference,
    what_is_not_finite_reaches_a_row_or_a_column_of_one_gradient,
    rows_are_quantised_by_the_formats_rules,
    weights_are_quantised_by_the_formats_rules,
    messages_are_split_byte_for_byte,
    products_are_near_their_reference,
    products_of_models_widths_are_near_their_reference,
    more_groups_than_tiles_in_turn_are_found,
    what_is_not_finite_stays_in_its_block,
    messages_of_zeros_have_products_of_zero,
    no_rows_and_no_groups_rows_are_zero,
    only_rows_behind_the_groups_become_zeros,
)

if __name__ == "__main__":
    hold_in_interpreter(PROPERTIES)
