"""Grouped products count as compute, forward and backward, wherever torch's counter is asked."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import moe_compile.backend  # noqa: F401  (it registers them)
from moe_compile.ops.product_counts import count_grouped_products
from moe_compile.ops.scaled_products import GROUPED_MM_FP8

ROWS, IN, OUT, GROUPS = 48, 16, 32, 3
ONE = 2 * ROWS * IN * OUT
OFFSETS = torch.tensor([8, 8, 48], dtype=torch.int32)  # the second group is empty


def counted(product, *operands):
    """Return the operations of forward, and of forward and backward."""
    operands = [o.bfloat16().requires_grad_() for o in operands]
    with FlopCounterMode(display=False) as counter:
        made = product(*operands)
        forward = counter.get_total_flops()
        made.backward(torch.ones_like(made))
    return forward, counter.get_total_flops()


def test_rows_by_their_groups_matrix_cost_each_row_once_in_each_of_three_products():
    """Backward has rows by matrices again, and two operands of two dimensions for the weights."""
    rows, weights = torch.randn(ROWS, IN), torch.randn(GROUPS, IN, OUT)
    assert counted(lambda a, w: torch._grouped_mm(a, w, offs=OFFSETS), rows, weights) == (
        ONE, 3 * ONE,
    )  # fmt: skip


def test_columns_by_their_groups_matrix_cost_each_column_once():
    """Backward has three by two dimensions, and two by two for the weights."""
    weights, columns = torch.randn(GROUPS, OUT, IN), torch.randn(ROWS, IN)
    product = counted(lambda w, c: torch._grouped_mm(w, c.t(), offs=OFFSETS), weights, columns)
    assert product == (ONE, 3 * ONE)


def test_a_product_of_two_parted_matrices_costs_what_the_whole_would():
    made, rows = torch.randn(ROWS, OUT), torch.randn(ROWS, IN)
    product = counted(lambda m, r: torch._grouped_mm(m.t(), r, offs=OFFSETS), made, rows)
    assert product == (ONE, 3 * ONE)


def test_matrices_on_both_sides_cost_what_a_batch_does():
    left, right = torch.randn(GROUPS, ROWS, IN), torch.randn(GROUPS, IN, OUT)
    assert counted(torch._grouped_mm, left, right) == (GROUPS * ONE, 3 * GROUPS * ONE)


def test_products_of_scaled_eight_bit_rows_count_alike():
    """Shapes alone: no kernel for them on a CPU."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        rows = torch.empty(ROWS, IN, dtype=torch.float8_e4m3fn)
        weights = torch.empty(GROUPS, OUT, IN, dtype=torch.float8_e4m3fn).transpose(1, 2)
        scales = torch.ones(ROWS), torch.ones(GROUPS, OUT)
        offsets = torch.zeros(GROUPS, dtype=torch.int32)
        torch._scaled_grouped_mm(rows, weights, *scales, offs=offsets, out_dtype=torch.bfloat16)
    assert counter.get_total_flops() == ONE


@pytest.mark.parametrize("gradient", ["bf16", "e4m3"])
def test_our_products_in_eight_bits_count_alike(gradient):
    rows, weights = torch.randn(ROWS, IN), torch.randn(GROUPS, IN, OUT)
    product = lambda a, w: GROUPED_MM_FP8(a, w, OFFSETS, "rowwise", "e4m3", gradient, "bf16")  # noqa: E731
    assert counted(product, rows, weights) == (ONE, 3 * ONE)


def test_our_gradients_of_weights_in_eight_bits_count_their_whole_blocks_of_rows():
    rows, weights, offs = torch.randn(300, IN), torch.randn(GROUPS, IN, OUT), 100 * (OFFSETS > 0)
    product = lambda a, w: GROUPED_MM_FP8(a, w, offs.int(), "blockwise", *3 * ("e4m3",))  # noqa: E731
    assert counted(product, rows, weights)[1] == 2 * (300 + 300 + 256) * IN * OUT


@pytest.mark.parametrize("name", ["_grouped_mm", "_scaled_grouped_mm"])
def test_what_is_not_registered_is_and_what_is_stays(monkeypatch, name):
    packet = getattr(torch.ops.aten, name)
    assert packet in flop_registry  # the backend was imported
    monkeypatch.setitem(flop_registry, packet, len)
    count_grouped_products()
    assert flop_registry[packet] is len
    monkeypatch.delitem(flop_registry, packet)
    count_grouped_products()
    assert flop_registry[packet]((6, 2), (3, 2, 5)) == 2 * 6 * 2 * 5
