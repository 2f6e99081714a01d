"""Gradients of weights in eight bits: blocks along rows, references, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compile.ops.scaled_products import GROUPED_MM_FP8
from moe_compile.ops.weight_gradients import (
    QUANTIZE_COLUMNS,
    REFERENCES,
    SCALED_WEIGHT_GRADIENT,
)
from moe_compile.ops.wire_format import BLOCK
from tests.ops.test_scaled_products import CHECKS, as_torchs, drawn, ends, far, in_groups

ELEMENTS = pytest.mark.parametrize("element", ["e4m3", "e5m2"])
EIGHT = ("e4m3", "e4m3", "e4m3")


def gradient(rows, grads, offs, element="e4m3", dtype=torch.bfloat16):
    operands = (*QUANTIZE_COLUMNS(rows, offs), *QUANTIZE_COLUMNS(grads, offs, element))
    return SCALED_WEIGHT_GRADIENT(*operands, offs, dtype)


def dequantised(rows, offs, element="e4m3"):
    """Return the rows of groups as they are multiplied, in float64, read block by block."""
    payload, scales = QUANTIZE_COLUMNS(rows, offs, element)
    values, found, block = payload.double() * scales.double()[:, :, None], rows.double(), 0
    for _, group in in_groups(offs):
        for first in range(group.start, group.stop, BLOCK):
            last = min(first + BLOCK, group.stop)
            found[first:last] = values[block, :, : last - first].t()
            assert not payload[block, :, last - first :].float().any()
            block += 1
    assert not payload[block:].float().any()
    return found


COUNTS = st.lists(st.sampled_from([0, 1, 2, 127, 128, 129, 260]), min_size=1, max_size=4)


@given(COUNTS, st.integers(0, 140), st.integers(1, 40), st.sampled_from(["e4m3", "e5m2"]))
@settings(deadline=None, max_examples=40)
def test_128_rows_of_a_column_share_a_scale_from_each_groups_first(counts, behind, width, element):
    offs, num_rows = ends(*counts), sum(counts) + behind
    rows = drawn(num_rows, width, seed=num_rows)
    _, scales = QUANTIZE_COLUMNS(rows, offs, element)
    assert scales.shape == (num_rows // BLOCK + len(counts), width)
    near, largest = dequantised(rows, offs, element), {"e4m3": 448.0, "e5m2": 57344.0}[element]
    block = 0
    for _, group in in_groups(offs):
        for part in rows[group].float().split(BLOCK):
            if len(part):
                assert torch.equal(scales[block], part.abs().amax(0) / largest)
                block += 1
    used = int(offs[-1])
    half = {"e4m3": 2**-4, "e5m2": 2**-3}[element]
    torch.testing.assert_close(near[:used], rows[:used].double(), rtol=half * 1.001, atol=2**-6)


@ELEMENTS
@pytest.mark.parametrize("counts", [(0, 1, 129, 0), (5, 0, 256, 3), (0, 0, 0, 0)])
def test_gradients_are_the_products_of_the_dequantised_operands(element, counts):
    """To products in float64: float32 adds up the rows, and the result is rounded once."""
    offs, rows, grads = ends(*counts), drawn(270, 136), drawn(270, 72, seed=1)
    found = gradient(rows, grads, offs, element).double()
    left, right = dequantised(rows, offs), dequantised(grads, offs, element)
    assert found.shape == (4, 136, 72)
    for expert, group in in_groups(offs):
        a, b = left[group].t(), right[group]
        bound = 2.0**-8 * (a @ b).abs() + 270 * 2.0**-23 * (a.abs() @ b.abs())
        assert ((found[expert] - a @ b).abs() <= bound).all()
        assert found[expert].any() == (group.stop > group.start)


def test_no_row_behind_the_groups_is_read():
    rows, grads, offs = drawn(7, 32), drawn(7, 24), ends(2, 3)
    poisoned = [torch.cat([one[:5], torch.full_like(one[5:], torch.nan)]) for one in (rows, grads)]
    assert torch.equal(gradient(*poisoned, offs), gradient(rows, grads, offs))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_block(bad):
    rows, grads, offs = drawn(300, 40), drawn(300, 24), ends(260, 40)
    clean = gradient(rows, grads, offs)
    rows[200, 7], grads[270, 3] = bad, bad
    near = dequantised(rows, offs)
    assert near[128:256, 7].isnan().all() and near[:128].isfinite().all()
    assert near[256:].isfinite().all() and near.isnan().sum() == 128
    found = gradient(rows, grads, offs)
    assert found[0, 7].isnan().all() and found[1, :, 3].isnan().all()
    found[0, 7], found[1, :, 3] = clean[0, 7], clean[1, :, 3]
    assert torch.equal(found, clean)


@ELEMENTS
@pytest.mark.parametrize("by_column", [False, True])
def test_the_gradient_of_a_weight_is_near_torchs_and_has_its_layout(element, by_column):
    rows, weight, offs = drawn(300, 288), drawn(4, 288, 160), ends(2, 0, 198, 100)
    if by_column:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    weight.requires_grad_()
    found = GROUPED_MM_FP8(rows, weight, offs, "blockwise", "bf16", "bf16", element)
    plain, into = as_torchs(rows, weight, offs), drawn(300, 160, seed=1)
    ours, theirs = (torch.autograd.grad(one, weight, into)[0] for one in (found, plain))
    assert torch.equal(found, plain) and ours.stride() == theirs.stride()
    assert 0 < far(ours, theirs) < (0.05 if element == "e4m3" else 0.07)
    expected = gradient(rows, into, offs, element)
    torch.testing.assert_close(ours, expected, rtol=2**-7, atol=1e-3)


ROWS, GRADS, ENDS = torch.ones(5, 20), torch.ones(5, 12), ends(2, 3)
BY = (*QUANTIZE_COLUMNS(ROWS, ENDS), *QUANTIZE_COLUMNS(GRADS, ENDS))
BF16 = torch.bfloat16
CASES = {
    QUANTIZE_COLUMNS: [(ROWS, ENDS), (drawn(0, 9), ends(0)), (ROWS.bfloat16(), ENDS, "e5m2")],
    SCALED_WEIGHT_GRADIENT: [(*BY, ENDS, BF16), (*BY, ENDS, torch.float32)],
}


@pytest.mark.parametrize("op", REFERENCES, ids=str)
def test_operators_are_as_torch_wants_them(op):
    for arguments in CASES[op]:
        torch.library.opcheck(op, arguments, test_utils=CHECKS)


@pytest.mark.parametrize(
    ("op", "wrong", "says"),
    [
        (QUANTIZE_COLUMNS, (ROWS[0], ENDS), "a matrix of bfloat16"),
        (QUANTIZE_COLUMNS, (ROWS.int(), ENDS), "a matrix of bfloat16"),
        (QUANTIZE_COLUMNS, (ROWS, ENDS.long()), r"offs must be int32 \[E\]"),
        (QUANTIZE_COLUMNS, (ROWS, ENDS, "int8"), "e4m3 or e5m2"),
        (SCALED_WEIGHT_GRADIENT, (ROWS, *BY[1:], ENDS, BF16), r"payloads \[B, K, 128\]"),
        (SCALED_WEIGHT_GRADIENT, (BY[0], BY[1][:, :3], *BY[2:], ENDS, BF16), "got 3 scales"),
        (SCALED_WEIGHT_GRADIENT, (*BY, ENDS.long(), BF16), r"offs must be int32 \[E\]"),
        (SCALED_WEIGHT_GRADIENT, (*BY, ENDS, torch.int8), "gradients of weights must be"),
    ],
)
def test_what_does_not_fit_is_refused(op, wrong, says):
    with pytest.raises(ValueError, match=says):
        op(*wrong)


def test_operands_of_other_blocks_are_refused():
    with pytest.raises(RuntimeError, match="rows and gradients must have equally many blocks"):
        SCALED_WEIGHT_GRADIENT(*BY[:2], BY[2][:1], BY[3][:1], ENDS, BF16)
