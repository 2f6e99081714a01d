"""Products in eight bits, chunked or not, equal a layer that quantises eagerly, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compile.ops.quantized_rows import GATHER_QUANTIZE_PACK, UNPACK_DEQUANTIZE
from moe_compile.ops.scaled_products import GROUPED_MM_FP8, MESSAGE_ROWS, QUANTIZE_ROWS
from moe_compile.testing.equivalence import differing_tensors
from moe_compile.testing.product_errors import product_error_bound, weight_gradient_error_bound
from tests.equivalence.test_layers import build, inputs, one_case
from tests.equivalence.test_quantized_wire import check_signal
from tests.layers import FusedGateUp, GroupedExperts
from tests.quantized_layers import in_eight_bits, quantized_eagerly
from tests.slow_parameters import exhaustive_but, slow_but

BF16 = torch.bfloat16
WIRES = {"dispatch_wire": "fp8", "combine_wire": "fp8"}
ALL = ("gate", "up", "down", "grad_input", "grad_weight")


def run_case(rank, case, style, recipe, elements, options):
    torch._dynamo.reset()
    wires = (options.get(wire, "same") for wire in WIRES)
    eager = in_eight_bits(quantized_eagerly(style, *wires), recipe, *elements)
    asked = {"megamoe.strict": True, "megamoe.chunks": case.chunks}
    asked |= {f"megamoe.{name}": value for name, value in options.items()}
    return differing_tensors(
        lambda: build(case, style), inputs(case, rank), asked, lambda: build(case, eager)
    )


def check(pool, case, style, recipe, elements, options):
    for rank, differing in enumerate(pool.run(run_case, case, style, recipe, elements, options)):
        assert not differing, f"rank {rank}: {differing}"


def a_case(style=GroupedExperts, **changes):
    """Widths are multiples of 16, as `rowwise` needs, and one of two is of more than one block."""
    sizes = {"width": 160, "hidden": 96, "num_experts": 8}
    return one_case(style, (9, 14), (16, 3), dtype=torch.bfloat16, **sizes, **changes)


FORMS = [
    (GroupedExperts, "blockwise", "e4m3", 2),
    (GroupedExperts, "rowwise", "e4m3", 3),
    (GroupedExperts, "blockwise", "e5m2", 4),
]


@pytest.mark.parametrize(("style", "recipe", "gradient", "chunks"), slow_but([], FORMS))
def test_every_format_in_any_number_of_chunks(two_devices, style, recipe, gradient, chunks):
    of_gradients = "_e5m2" if gradient == "e5m2" else ""
    options = {"expert_compute": f"fp8_{recipe}{of_gradients}"}
    check(
        two_devices,
        a_case(style, chunks=chunks),
        style,
        recipe,
        [("e4m3", gradient, "bf16")],
        options,
    )


EIGHT, MODELS = "e4m3", "bf16"
SOME = [
    (
        GroupedExperts,
        ("gate", "grad_weight"),
        [(EIGHT, MODELS, EIGHT), *2 * [(MODELS, MODELS, EIGHT)]],
    ),
    (GroupedExperts, ("up", "down"), [3 * (MODELS,), *2 * [(EIGHT, MODELS, MODELS)]]),
    (FusedGateUp, ("up", "gate", "grad_weight"), [(EIGHT, MODELS, EIGHT), (MODELS, MODELS, EIGHT)]),
    (
        GroupedExperts,
        ("down", "grad_input"),
        [*2 * [(MODELS, EIGHT, MODELS)], (EIGHT, EIGHT, MODELS)],
    ),
]
"""Products that are named, with the element types of each product that the model calls."""


@pytest.mark.parametrize(("style", "chosen", "elements"), slow_but(SOME[:1], SOME))
def test_products_that_are_not_named_are_as_in_the_model(two_devices, style, chosen, elements):
    options = {"expert_compute": "fp8_blockwise", "fp8_products": chosen}
    check(two_devices, a_case(style, chunks=2), style, "blockwise", elements, options)


@pytest.mark.parametrize("chunks", slow_but([2], [1, 2, 4]))
def test_rows_that_arrive_in_eight_bits_feed_products_as_they_came(two_devices, chunks):
    """And so do gradients of results; eagerly both are unpacked, and quantised again."""
    options = {"expert_compute": "fp8_blockwise", "fp8_products": ALL, **WIRES}
    elements = [("e4m3", "e4m3", "e4m3")]
    check(two_devices, a_case(chunks=chunks), GroupedExperts, "blockwise", elements, options)


@given(st.integers(1, 300), st.integers(-100, 100), st.integers(0, 999))
@settings(deadline=None)
def test_rows_that_were_unpacked_are_quantised_to_the_bytes_that_they_had(width, power, seed):
    """Of any magnitude, and with blocks of zeros."""
    own = torch.Generator().manual_seed(seed)
    spread = torch.randn(3, width, generator=own) * torch.randn(3, width, generator=own).exp2()
    rows = (spread * 2.0**power).to(BF16)
    rows[1, 128:] = 0
    message = GATHER_QUANTIZE_PACK(rows)
    again, scales = QUANTIZE_ROWS(UNPACK_DEQUANTIZE(message, width, BF16), "blockwise")
    payload, their_scales = MESSAGE_ROWS(message, None, width)
    assert torch.equal(again.view(torch.uint8), payload.view(torch.uint8))
    assert torch.equal(scales, their_scales)


# --- the bound ---------------------------------------------------------------------------------

ROUNDED = torch.finfo(BF16).eps / 2
COUNTS = (5, 0, 40, 1)
"""Rows of each expert."""


def layer_of_two_products(x, w1, w2, offs, gradient, recipe, *elements):
    """Return activations, their gradient, output and gradients of a layer of four experts."""
    x, w1, w2 = (one.clone().requires_grad_() for one in (x, w1, w2))
    h = torch.relu(GROUPED_MM_FP8(x, w1, offs, recipe, "e4m3", *elements))
    h.retain_grad()
    out = GROUPED_MM_FP8(h, w2, offs, recipe, "e4m3", *elements)
    out.backward(gradient)
    of_products = torch.where(h > 0, h.grad, 0)
    return [t.detach() for t in (h, of_products, out, x.grad, w1.grad, w2.grad)]


def summed(carried, left, right):
    """Return the error of a product over rows, of which `carried` has what one side is off by."""
    terms, off = left.abs() @ right.abs(), carried[0].abs() @ carried[1].abs()
    return off + (ROUNDED + left.shape[1] * 2.0**-23) * (terms + off)


@pytest.mark.parametrize(
    ("recipe", "element", "of_weights"),
    [("blockwise", "e4m3", "e4m3"), ("blockwise", "e5m2", "e5m2"), ("rowwise", "e4m3", "bf16")],
)
@pytest.mark.parametrize("seed", range(3))
def test_outputs_and_gradients_of_a_layer_are_within_the_bound(recipe, element, of_weights, seed):
    """In each product by its own bound; differences of what it is given are carried on."""
    own = torch.Generator().manual_seed(seed)
    num, width, hidden = sum(COUNTS), 160, 272
    shapes = ((num, width), (4, width, hidden), (4, hidden, width), (num, width))
    x, w1, w2, gradient = (torch.randn(*s, generator=own).to(BF16) for s in shapes)
    x[:, 3] *= 2.0 ** (seed * 5)  # one column is far above the others
    offs = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    found = layer_of_two_products(x, w1, w2, offs, gradient, recipe, element, of_weights)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            group = slice(start, end)
            mine = [one[group] for one in found[:4]] + [one[expert] for one in found[4:]]
            given = (x[group], w1[expert], w2[expert], gradient[group])
            for name, error, most in of_one_expert(mine, *given, recipe, element, of_weights):
                assert (error <= most).all(), f"{name} of expert {expert} is beyond the bound"
                assert error.max() > 0
        start = end


def of_one_expert(found, x, w1, w2, gradient, recipe, element, of_weights):
    """Yield each result of an expert with its errors, beside float64, and their bounds."""
    h, of_products, out, of_x, of_w1, of_w2 = found

    def bound(left, right, **more):
        return product_error_bound(left, right, recipe, dtype=BF16, **more)

    wide_x, wide_w1, wide_w2, wide_gradient = (t.double() for t in (x, w1, w2, gradient))
    product = wide_x @ wide_w1
    exact_h = product.clamp_min(0)
    off_h = bound(x, w1)
    yield "activation", (h - exact_h).abs(), off_h
    off_out = bound(h, w2) + off_h @ wide_w2.abs()
    yield "output", (out - exact_h @ wide_w2).abs(), off_out
    back = wide_gradient @ wide_w2.T
    off_back = bound(gradient, w2.T, element=element)
    exact_back = torch.where(product > 0, back, 0)
    off_back += torch.where(product.abs() <= off_h, back.abs(), 0)  # it may be on either side
    yield "gradient of products", (of_products - exact_back).abs(), off_back
    off_x = bound(of_products, w1.T, element=element) + off_back @ wide_w1.abs().T
    yield "gradient of rows", (of_x - exact_back @ wide_w1.T).abs(), off_x

    def bound_of_weight(rows, grads, carried, exact_rows, exact_grads):
        if of_weights == "bf16":
            return summed(carried, exact_rows.T, exact_grads)
        own = weight_gradient_error_bound(rows, grads, element=of_weights, dtype=BF16)
        return own + carried[0].abs() @ carried[1].abs()

    error = (of_w2 - exact_h.T @ wide_gradient).abs()
    carried = off_h.T, wide_gradient
    yield "second weight", error, bound_of_weight(h, gradient, carried, exact_h, wide_gradient)
    error = (of_w1 - wide_x.T @ exact_back).abs()
    carried = wide_x.T, off_back
    yield "first weight", error, bound_of_weight(x, of_products, carried, wide_x, exact_back)


# --- signal to noise ---------------------------------------------------------------------------

FLOORS = [
    ({"expert_compute": "fp8_blockwise"}, (23.5, 23.5, 24.5)),
    ({"expert_compute": "fp8_rowwise"}, (23.5, 23.5, 24.5)),
    ({"expert_compute": "fp8_blockwise_e5m2"}, (23.5, 22.5, 22.5)),
    ({"expert_compute": "fp8_blockwise", **WIRES}, (23, 23, 23.5)),
    ({"expert_compute": "fp8_blockwise", "fp8_products": ALL}, (23.5, 23.5, 23)),
]


SIGNALS = [(*given, codegen) for codegen in ("fx", "inductor") for given in FLOORS]


@pytest.mark.parametrize(
    ("options", "floors", "codegen"),
    exhaustive_but((*SIGNALS[: len(FLOORS)], SIGNALS[-1]), SIGNALS),
    ids=str,
)
def test_routed_output_and_gradients_keep_their_signal(two_ranks, options, floors, codegen):
    check_signal(two_ranks, codegen, options, floors)
