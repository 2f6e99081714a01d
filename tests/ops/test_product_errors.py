"""The bound of a product's error holds, and is not far above what happens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compile.ops.product_formats import FORMATS
from moe_compile.ops.quantized_rows import GATHER_QUANTIZE_PACK, UNPACK_DEQUANTIZE
from moe_compile.ops.scaled_products import QUANTIZE_ROWS, QUANTIZE_WEIGHT, SCALED_GROUPED_MM
from moe_compile.ops.weight_gradients import QUANTIZE_COLUMNS, SCALED_WEIGHT_GRADIENT
from moe_compile.testing.product_errors import (
    IN_TENSOR_CORES,
    product_error_bound,
    weight_gradient_error_bound,
)

WAYS = [(recipe, element) for recipe in FORMATS for element in FORMATS[recipe].elements]


def found_and_exact(rows, weight, recipe, element, dtype):
    offs = torch.tensor([rows.shape[0]], dtype=torch.int32)
    operands = (*QUANTIZE_ROWS(rows, recipe, element), *QUANTIZE_WEIGHT(weight[None], recipe))
    return SCALED_GROUPED_MM(*operands, offs, recipe, dtype), rows.double() @ weight.double()


@given(
    way=st.sampled_from(WAYS),
    sizes=st.tuples(st.integers(0, 5), st.integers(1, 24), st.integers(1, 24)),
    exponents=st.tuples(st.integers(-30, 20), st.integers(0, 24)),
    is_wide=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=200)
def test_no_element_is_further_from_the_exact_product(way, sizes, exponents, is_wide, seed):
    """Of numbers some of which are subnormal in their block; float64 counts as exact."""
    own, (recipe, element) = torch.Generator().manual_seed(seed), way
    chosen = FORMATS[recipe]
    step = max(chosen.multiple, 16)
    num_rows, width, columns = sizes[0], step * sizes[1], step * sizes[2]
    low, spread = exponents

    def draw(*shape):
        exponents = low + spread * torch.rand(*shape, generator=own)
        return torch.randn(*shape, generator=own) * torch.exp2(exponents)

    rows, weight = draw(num_rows, width).bfloat16(), draw(width, columns).bfloat16()
    dtype = chosen.results[-1 if is_wide else 0]
    found, exact = found_and_exact(rows, weight, recipe, element, dtype)
    bound = product_error_bound(rows, weight, recipe, element=element, dtype=dtype)
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("element", FORMATS["blockwise"].elements)
def test_the_worst_numbers_come_near_the_bound(element):
    """17 is half-way between two e4m3, 18 between two e5m2; scales are 1."""
    half_way = {"e4m3": 17.0, "e5m2": 18.0}
    largest = {"e4m3": 448.0, "e5m2": 57344.0}
    rows, weight = torch.full((1, 128), half_way[element]), torch.full((128, 16), 17.0)
    rows[0, 0], weight[1] = largest[element], 448.0
    rows[0, 1], weight[0] = 0, 0
    found, exact = found_and_exact(rows, weight, "blockwise", element, torch.float32)
    bound = product_error_bound(rows, weight, "blockwise", element=element)
    assert (0.8 * bound <= (found - exact).abs()).all() and (found < exact).all()


def test_a_product_of_normal_numbers_is_off_by_an_eighth_of_its_magnitudes():
    own = torch.Generator().manual_seed(0)
    rows, weight = (1 + torch.rand(*shape, generator=own) for shape in ((3, 256), (256, 32)))
    magnitudes = rows.double() @ weight.double()
    share = 2.0**-4 + 2.0**-4 + 2.0**-8
    found = product_error_bound(rows, weight, "blockwise")
    assert (share * magnitudes <= found).all() and (found <= 1.01 * share * magnitudes).all()
    of_cores = product_error_bound(rows, weight, "blockwise", unit=IN_TENSOR_CORES)
    assert (of_cores <= (share + 1.2 * 128 * 2.0**-13) * magnitudes).all()


def gradient_and_exact(rows, grads, element, came, dtype):
    """Return the gradient of a weight, and the exact one of rows as they were before they came."""
    offs = torch.tensor([rows.shape[0]], dtype=torch.int32)
    given = [
        UNPACK_DEQUANTIZE(GATHER_QUANTIZE_PACK(one), one.shape[1], torch.bfloat16) if is_so else one
        for one, is_so in zip((rows, grads), came, strict=True)
    ]
    operands = (*QUANTIZE_COLUMNS(given[0], offs), *QUANTIZE_COLUMNS(given[1], offs, element))
    (found,) = SCALED_WEIGHT_GRADIENT(*operands, offs, dtype)
    return found, rows.double().t() @ grads.double()


@given(
    element=st.sampled_from(["e4m3", "e5m2"]),
    came=st.tuples(st.booleans(), st.booleans()),
    num_rows=st.integers(0, 300) | st.sampled_from([1, 127, 128, 129, 256]),
    sizes=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    exponents=st.tuples(st.integers(-30, 20), st.integers(0, 24)),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=120)
def test_no_gradient_of_a_weight_is_further_from_the_exact_one(
    element, came, num_rows, sizes, exponents, dtype, seed
):
    """Rows and gradients that came in a message are rounded twice."""
    own, (low, spread) = torch.Generator().manual_seed(seed), exponents

    def draw(*shape):
        exponents = low + spread * torch.rand(*shape, generator=own)
        return (torch.randn(*shape, generator=own) * torch.exp2(exponents)).bfloat16()

    rows, grads = draw(num_rows, sizes[0]), draw(num_rows, sizes[1])
    found, exact = gradient_and_exact(rows, grads, element, came, dtype)
    bound = weight_gradient_error_bound(rows, grads, element=element, came=came, dtype=dtype)
    assert ((found.double() - exact).abs() <= bound).all()


def test_the_worst_rows_come_near_the_bound_of_a_gradient():
    """17 is half-way between two e4m3; scales are 1, along rows and in the message."""
    rows, grads = torch.full((128, 3), 17.0), torch.full((128, 2), 17.0)
    rows[0], grads[1] = 448.0, 448.0
    rows[1], grads[0] = 0, 0
    found, exact = gradient_and_exact(rows, grads, "e4m3", (False, False), torch.float32)
    bound = weight_gradient_error_bound(rows, grads)
    assert (0.8 * bound <= (found - exact).abs()).all() and (found < exact).all()


@pytest.mark.parametrize(("came", "share"), [(False, 2.0**-4), (True, 0.1333)])
def test_rows_that_came_in_eight_bits_are_off_by_two_roundings(came, share):
    own = torch.Generator().manual_seed(0)
    rows, grads = (1 + torch.rand(*shape, generator=own) for shape in ((300, 40), (300, 20)))
    magnitudes = rows.double().t() @ grads.double()
    found = weight_gradient_error_bound(rows, grads, came=(came, False))
    share = (1 + share) * (1 + 2.0**-4) - 1
    assert (share * magnitudes <= found).all() and (found <= 1.01 * share * magnitudes).all()
