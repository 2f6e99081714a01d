"""Products in eight bits: formats, references, gradients, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compile.ops.product_formats import ELEMENTS, FORMATS, refusal
from moe_compile.ops.quantized_rows import GATHER_QUANTIZE_PACK, UNPACK_DEQUANTIZE
from moe_compile.ops.scaled_products import (
    DEQUANTIZE_WEIGHT,
    GROUPED_MM_FP8,
    MESSAGE_ROWS,
    QUANTIZE_ROWS,
    QUANTIZE_WEIGHT,
    REFERENCES,
    SCALED_GROUPED_MM,
)
from moe_compile.ops.wire_format import AMAX_MIN, BLOCK, num_blocks

RECIPES = pytest.mark.parametrize("recipe", FORMATS)
IN_EIGHT_BITS = pytest.mark.parametrize("recipe", [name for name in FORMATS if name != "nvfp4"])
"""test_four_bits.py has what four bits are."""
WIDTHS = st.integers(1, 300) | st.sampled_from([128, 256, 512])
E4M3 = torch.float8_e4m3fn
FORMATS_OF_THREE = ("e4m3", "e4m3", "bf16")
"""Element types of a product, and of the gradients of its rows and weight."""


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def drawn(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=seeded(seed)).to(dtype)


def ends(*counts):
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def bits(payload):
    return payload.view(torch.uint8)


def in_groups(offs):
    start = 0
    for expert, end in enumerate(offs.tolist()):
        yield expert, slice(start, end)
        start = end


def operands(rows, weight, recipe):
    return (*QUANTIZE_ROWS(rows, recipe, first(recipe)), *QUANTIZE_WEIGHT(weight, recipe))


def first(recipe):
    """The element type of its weights."""
    return FORMATS[recipe].elements[0]


def product(rows, weight, offs, recipe, dtype=torch.bfloat16):
    return SCALED_GROUPED_MM(*operands(rows, weight, recipe), offs, recipe, dtype)


@given(st.integers(0, 6), WIDTHS, st.integers(0, 99))
@settings(deadline=None)
def test_rows_in_blocks_are_what_a_message_of_them_holds(num_rows, width, seed):
    rows = drawn(num_rows, width, seed=seed)
    payload, scales = QUANTIZE_ROWS(rows, "blockwise")
    message = GATHER_QUANTIZE_PACK(rows)
    came, their_scales = MESSAGE_ROWS(message, None, width)
    assert payload.shape == (num_rows, width) and scales.shape == (num_rows, num_blocks(width))
    assert torch.equal(bits(payload), bits(came)) and torch.equal(scales, their_scales)
    index = torch.randint(-num_rows, num_rows, (4,), generator=seeded(seed)) if num_rows else None
    picked, of_picked = MESSAGE_ROWS(message, index, width)
    by_hand = message if index is None else message[index]
    values = picked.float() * of_picked.repeat_interleave(BLOCK, 1)[:, :width]
    assert torch.equal(values, UNPACK_DEQUANTIZE(by_hand, width, torch.float32))
    beyond = torch.arange(num_rows, num_rows + 2)
    assert not any(one.float().any() for one in MESSAGE_ROWS(message, beyond, width))


@pytest.mark.parametrize(("element", "largest"), [("e4m3", 448.0), ("e5m2", 57344.0)])
def test_the_largest_of_a_block_is_the_largest_of_its_type(element, largest):
    rows = torch.zeros(1, 130)
    rows[0, :2] = torch.tensor([1.0, -0.5])
    payload, scales = QUANTIZE_ROWS(rows, "blockwise", element)
    assert payload[0, :2].float().tolist() == [largest, -largest / 2]
    assert scales[0, 0] == torch.tensor(1.0) / largest
    assert scales[0, 1] == torch.tensor(2.0**-126)  # of zeros: the least normal number


@given(st.integers(1, 3), WIDTHS, WIDTHS, st.integers(0, 99))
@settings(deadline=None)
def test_a_weight_that_is_unpacked_is_quantised_to_what_it_was(experts, width, columns, seed):
    """Its blocks are those of the transposed weight, whose payload is the same, transposed."""
    weight = drawn(experts, width, columns, seed=seed) * 2.0 ** (seed - 50)
    payload, scales = QUANTIZE_WEIGHT(weight, "blockwise")
    again = DEQUANTIZE_WEIGHT(payload, scales, "blockwise", torch.bfloat16)
    assert again.stride() == payload.stride()
    torch.testing.assert_close(again, weight, rtol=2**-3.9, atol=2**-9 * scales.max().item())
    for one in (again, weight):
        turned, of_turned = QUANTIZE_WEIGHT(one.transpose(1, 2), "blockwise")
        assert torch.equal(bits(turned), bits(payload.transpose(1, 2)))
        assert torch.equal(of_turned, scales.transpose(1, 2))


def test_a_row_or_a_column_has_one_scale_if_rowwise():
    rows, weight = drawn(3, 48), drawn(2, 48, 32)
    _, scales = QUANTIZE_ROWS(rows, "rowwise")
    assert torch.equal(scales, rows.float().abs().amax(1) / 448)
    payload, scales = QUANTIZE_WEIGHT(weight, "rowwise")
    assert torch.equal(scales, weight.float().abs().amax(1) / 448)
    near = payload.float() * scales[:, None]
    torch.testing.assert_close(near, weight.float(), rtol=2**-4, atol=2**-9 * scales.max().item())


def test_a_square_of_a_weight_has_one_scale_if_blockwise():
    weight = drawn(2, 200, 130)
    payload, scales = QUANTIZE_WEIGHT(weight, "blockwise")
    assert scales.shape == (2, 2, 2)
    squares = ((slice(0, 128), slice(0, 128)), (slice(128, 200), slice(128, 130)))
    for at, (down, across) in enumerate(squares):
        square = weight[:, down, across].float()
        largest = square.abs().amax((1, 2)) / 448
        assert torch.equal(scales[:, at, at], largest)
        near = payload[:, down, across].float() * largest[:, None, None]
        torch.testing.assert_close(near, square, rtol=2**-4, atol=2**-9 * largest.max().item())


def test_scales_of_mxfp8_are_the_least_powers_of_two_that_cut_nothing():
    rows = torch.zeros(6, 32)
    rows[:, 3] = torch.tensor([448.0, 449.0, -1.0, torch.inf, torch.nan, 3e38])
    payload, scales = QUANTIZE_ROWS(rows, "mxfp8")
    assert scales.dtype is torch.float8_e8m0fnu and scales.shape == (6, 1)
    assert scales.float()[[0, 1, 2, 5], 0].tolist() == [1.0, 2.0, 2.0**-8, 2.0**120]
    assert scales.float()[3:5].isnan().all() and payload[3:5].float().isnan().all()
    assert payload[:3, 3].float().tolist() == [448.0, 224.0, -256.0]
    _, scales = QUANTIZE_WEIGHT(drawn(2, 64, 96), "mxfp8")
    assert scales.shape == (2, 2, 96)


@pytest.mark.parametrize(
    ("recipe", "capability", "says"),
    [
        ("rowwise", (9, 0), None),
        ("blockwise", (9, 0), None),
        ("blockwise", (8, 9), "compute capability 9.0, and this GPU has 8.9: no recipe runs"),
        ("mxfp8", (9, 0), "10.0, and this GPU has 9.0: write rowwise or blockwise"),
        ("mxfp8", (10, 0), "no kernel for products of recipe 'mxfp8' yet: write rowwise or"),
        ("nvfp4", (9, 0), "'nvfp4' need the tensor cores of compute capability 10.0, and this GPU"),
        ("nvfp4", (10, 0), "no kernel for products of recipe 'nvfp4' yet: write rowwise or"),
    ],
)
def test_a_gpu_that_does_not_multiply_a_format_is_told_why(recipe, capability, says):
    why = refusal(FORMATS[recipe], capability)
    assert (why is None) == (says is None) and (says or "") in (why or "")


@RECIPES
def test_a_weights_payload_runs_along_what_is_summed(recipe):
    weight = drawn(2, 160, 288)
    for one in (weight, weight.transpose(1, 2)):
        payload, _ = QUANTIZE_WEIGHT(one, recipe)
        experts, width, columns = one.shape
        in_bytes = width // ELEMENTS[first(recipe)].per_byte
        assert payload.shape == (experts, in_bytes, columns)
        assert payload.transpose(1, 2).is_contiguous()


def test_squares_serve_both_directions():
    weight = drawn(2, 200, 130)
    payload, scales = QUANTIZE_WEIGHT(weight, "blockwise")
    back, their_scales = QUANTIZE_WEIGHT(weight.transpose(1, 2), "blockwise")
    assert torch.equal(bits(back), bits(payload.transpose(1, 2).contiguous()).view_as(back))
    assert torch.equal(their_scales, scales.transpose(1, 2))


@IN_EIGHT_BITS
@pytest.mark.parametrize("counts", [(0, 1, 129, 0), (5, 0, 0, 3), (0, 0, 0, 0)])
def test_products_are_those_of_the_dequantised_operands(recipe, counts):
    """To products in float64: float32 adds up 288 numbers, and the result is rounded once."""
    offs, rows, weight = ends(*counts), drawn(131, 288), drawn(4, 288, 160)
    payload, row_scales, by, by_scales = operands(rows, weight, recipe)
    found = product(rows, weight, offs, recipe).double()
    block, square = {"rowwise": (288, 1), "blockwise": (128, 128), "mxfp8": (32, 1)}[recipe]
    row_scales, by_scales = row_scales.double().view(131, -1), by_scales.double()
    by_scales = by_scales.view(4, row_scales.shape[1], -1)
    for expert, group in in_groups(offs):
        a, b = payload[group].double(), by[expert].double()
        for k in range(288):
            a[:, k] *= row_scales[group, k // block]
            b[k] *= by_scales[expert, k // block].repeat_interleave(square)[:160]
        bound = 2.0**-8 * (a @ b).abs() + 288 * 2.0**-23 * (a.abs() @ b.abs())
        assert ((found[group] - a @ b).abs() <= bound).all()
    assert not found[int(offs[-1]) :].any()


@RECIPES
def test_no_row_behind_the_groups_is_read(recipe):
    rows, weight, offs = drawn(7, 32), drawn(2, 32, 64), ends(2, 3)
    poisoned = rows.clone()
    poisoned[5:] = torch.nan
    found = product(poisoned, weight, offs, recipe)
    assert torch.equal(found, product(rows, weight, offs, recipe)) and not found[5:].any()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_block(bad):
    rows, weight, offs = drawn(4, 256), drawn(2, 256, 256), ends(2, 2)
    clean = product(rows, weight, offs, "blockwise")
    rows[1, 200] = bad
    payload, scales = QUANTIZE_ROWS(rows, "blockwise")
    near = payload.float() * scales.repeat_interleave(BLOCK, 1)
    assert near[1, BLOCK:].isnan().all() and near[[0, 2, 3]].isfinite().all()
    assert near[1, :BLOCK].isfinite().all()
    weight[1, 3, 250] = bad
    found = product(rows, weight, offs, "blockwise")
    assert found[1].isnan().all() and found[2:, BLOCK:].isnan().all()
    assert torch.equal(found[0], clean[0])
    assert torch.equal(found[2:, :BLOCK], clean[2:, :BLOCK])


@IN_EIGHT_BITS
def test_zeros_have_a_scale_and_their_product_is_zero(recipe):
    rows, weight, offs = drawn(4, 256), drawn(2, 256, 256), ends(2, 2)
    rows[1], weight[1] = 0, 0
    payload, row_scales, by, by_scales = operands(rows, weight, recipe)
    for scales in (row_scales[1], by_scales[1]):
        assert (scales.float() == AMAX_MIN / 448).all()
    found = SCALED_GROUPED_MM(payload, row_scales, by, by_scales, offs, recipe, torch.bfloat16)
    assert not found[1:].any() and found[0].all()
    if recipe == "blockwise":  # a message of zeros has scales of zero
        none = (payload, 0 * row_scales, by, by_scales)
        assert not SCALED_GROUPED_MM(*none, offs, recipe, torch.bfloat16).any()


FAR = {"e4m3": 0.05, "e5m2": 0.07, "e2m1": 0.2}
"""Most that a product of normal numbers is off by, as a share of its norm."""


def as_torchs(rows, weight, offs):
    return torch._grouped_mm(rows, weight, offs=offs)


@pytest.mark.parametrize("by_column", [True, False])
@pytest.mark.parametrize(
    ("recipe", "gradient"),
    [
        *((recipe, gradient) for recipe in FORMATS for gradient in FORMATS[recipe].elements),
        *((recipe, "bf16") for recipe in FORMATS),
    ],
)
def test_gradients_are_near_those_of_torchs_product(recipe, by_column, gradient):
    offs, rows, weight = ends(3, 0, 14), drawn(17, 288), drawn(3, 288, 160)
    if by_column:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    leaves = [rows.requires_grad_(), weight.requires_grad_()]
    found = GROUPED_MM_FP8(rows, weight, offs, recipe, first(recipe), gradient, "bf16")
    plain = as_torchs(rows, weight, offs)
    into = drawn(17, 160, seed=1)
    ours, theirs = (torch.autograd.grad(one, leaves, into) for one in (found, plain))
    assert torch.equal(found, product(rows.detach(), weight.detach(), offs, recipe))
    assert torch.equal(ours[1], theirs[1]) and ours[1].stride() == theirs[1].stride()
    shares = [far(found, plain), far(ours[0], theirs[0])]
    assert 0 < shares[0] < FAR[first(recipe)]
    if gradient == "bf16":
        assert torch.equal(ours[0], theirs[0])
    else:
        assert 0 < shares[1] < FAR[gradient]
        back = weight.detach().transpose(1, 2)
        by = (*QUANTIZE_ROWS(into, recipe, gradient), *QUANTIZE_WEIGHT(back, recipe))
        assert torch.equal(ours[0], SCALED_GROUPED_MM(*by, offs, recipe, torch.bfloat16))


def far(found, near):
    return ((found.float() - near.float()).norm() / near.float().norm()).item()


def test_a_forward_product_may_be_as_it_is():
    rows, weight, offs = drawn(17, 288).requires_grad_(), drawn(4, 288, 160), ends(2, 0, 9, 6)
    found = GROUPED_MM_FP8(rows, weight, offs, "blockwise", "bf16", "e4m3", "bf16")
    plain, into = as_torchs(rows, weight, offs), drawn(17, 160, seed=1)
    ours, theirs = (torch.autograd.grad(one, rows, into)[0] for one in (found, plain))
    assert torch.equal(found, plain) and 0 < far(ours, theirs) < 0.05


def test_only_gradients_that_are_needed_are_computed():
    rows, weight, offs = drawn(5, 32), drawn(2, 32, 48), ends(2, 3)
    alone = GROUPED_MM_FP8(rows.requires_grad_(), weight, offs, "rowwise", *FORMATS_OF_THREE)
    assert torch.autograd.grad(alone.sum(), rows)[0].shape == rows.shape
    alone = GROUPED_MM_FP8(
        rows.detach(), weight.requires_grad_(), offs, "rowwise", *FORMATS_OF_THREE
    )
    assert torch.autograd.grad(alone.sum(), weight)[0].shape == weight.shape


@pytest.mark.parametrize(
    ("recipe", "grad_weight"), [*((recipe, "bf16") for recipe in FORMATS), ("blockwise", "e4m3")]
)
def test_a_program_with_any_number_of_rows_compiles_whole(recipe, grad_weight):
    """The number of rows comes out of the data, as after an exchange."""

    def layer(x, keep, weight, offs):
        rows = x[keep.nonzero().squeeze(1)].sin()
        elements = (first(recipe), first(recipe), grad_weight)
        return GROUPED_MM_FP8(rows, weight, offs, recipe, *elements).sum()

    kept, weight, offs = [], drawn(2, 32, 64).requires_grad_(), ends(2, 3)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for keep in (torch.tensor([1, 1, 0, 1, 1, 1, 0]), torch.tensor([0, 0, 1, 1, 1, 1, 1])):
        x = drawn(7, 32, seed=len(kept)).requires_grad_()
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            both = [
                torch.autograd.grad(f(x, keep, weight, offs), (x, weight))
                for f in (compiled, layer)
            ]
        kept += [torch.equal(a, b) for a, b in zip(*both, strict=True)]
    assert kept == [True] * 4


def samples():
    rows, weight, offs = drawn(5, 224), drawn(2, 224, 160), ends(2, 3)
    message, index = GATHER_QUANTIZE_PACK(rows), torch.tensor([4, 0, -1])
    for_all = []
    for recipe in FORMATS:
        by = operands(rows, weight, recipe)
        for_all += [
            (QUANTIZE_ROWS, (rows, recipe, first(recipe))),
            (QUANTIZE_ROWS, (rows[:0], recipe, first(recipe))),
            (QUANTIZE_WEIGHT, (weight, recipe)),
            (QUANTIZE_WEIGHT, (weight.transpose(1, 2), recipe)),
            (SCALED_GROUPED_MM, (*by, offs, recipe, torch.bfloat16)),
        ]
    messages = [(MESSAGE_ROWS, (message, i, 224)) for i in (None, index, index[:1], index[:0])]
    gradient = (QUANTIZE_ROWS, (rows, "blockwise", "e5m2"))
    in_blocks = (*QUANTIZE_WEIGHT(weight, "blockwise"), "blockwise", torch.bfloat16)
    return [*for_all, *messages, gradient, (DEQUANTIZE_WEIGHT, in_blocks)]


CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""All but that of schemas, which multiplies what an operator returns: torch multiplies no e4m3."""


def test_operators_are_as_torch_wants_them():
    assert {op for op, _ in samples()} == {*REFERENCES}
    for op, sample in samples():
        torch.library.opcheck(op, sample, test_utils=CHECKS)


def test_the_differentiable_operator_is_as_torch_wants_it():
    rows, weight = drawn(5, 32).requires_grad_(), drawn(2, 32, 48).requires_grad_()
    torch.library.opcheck(
        GROUPED_MM_FP8, (rows, weight, ends(2, 3), "rowwise", *FORMATS_OF_THREE), test_utils=CHECKS
    )


ROWS, WEIGHT = torch.zeros(5, 200), torch.zeros(2, 200, 130)
BY = (*QUANTIZE_ROWS(ROWS, "blockwise"), *QUANTIZE_WEIGHT(WEIGHT, "blockwise"))
ENDS = torch.tensor([2, 5], dtype=torch.int32)
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("op", "wrong", "says"),
    [
        (QUANTIZE_ROWS, (ROWS, "columnwise"), "rowwise, blockwise, mxfp8"),
        (QUANTIZE_ROWS, (ROWS.long(), "rowwise"), "bfloat16, float16 or float32"),
        (QUANTIZE_ROWS, (ROWS[0], "rowwise"), "2 dimensions"),
        (QUANTIZE_ROWS, (ROWS, "rowwise", "e5m2"), "rows of recipe 'rowwise' must be e4m3"),
        (QUANTIZE_ROWS, (ROWS, "nvfp4"), "rows of recipe 'nvfp4' must be e2m1; got 'e4m3'"),
        (QUANTIZE_WEIGHT, (ROWS, "rowwise"), "3 dimensions"),
        (SCALED_GROUPED_MM, (*BY, ENDS.long(), "blockwise", BF16), r"int32 \[2\]"),
        (SCALED_GROUPED_MM, (*BY, ENDS[:1], "blockwise", BF16), r"int32 \[2\]"),
        (SCALED_GROUPED_MM, (*BY, ENDS, "blockwise", torch.float64), "float64"),
        (SCALED_GROUPED_MM, (*BY, ENDS, "rowwise", BF16), "16 divides"),
        (SCALED_GROUPED_MM, (ROWS, *BY[1:], ENDS, "blockwise", BF16), "float32"),
        (SCALED_GROUPED_MM, (BY[0], BY[1][:, :1], *BY[2:], ENDS, "blockwise", BF16), "scales of"),
        (SCALED_GROUPED_MM, (BY[0][:, :9], *BY[1:], ENDS, "blockwise", BF16), r"\[R, K\]"),
        (GROUPED_MM_FP8, (ROWS, WEIGHT, ENDS, "rowwise", "e4m3", "e5m2", "bf16"), "rows of recipe"),
        (GROUPED_MM_FP8, (ROWS, WEIGHT, ENDS, "blockwise", "int8", "e4m3", "bf16"), "e4m3 or e5m2"),
        (GROUPED_MM_FP8, (ROWS, WEIGHT, ENDS, "rowwise", *3 * ("e4m3",)), "no scales along rows"),
        (MESSAGE_ROWS, (torch.zeros(3, 9, dtype=torch.uint8), None, 8), "12 bytes"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(op, wrong, says):
    with pytest.raises(ValueError, match=says):
        op(*wrong)


def test_scales_of_fewer_rows_are_refused():
    with pytest.raises(RuntimeError, match="a row has no scale"):
        SCALED_GROUPED_MM(BY[0], BY[1][:4], *BY[2:], ENDS, "blockwise", BF16)
