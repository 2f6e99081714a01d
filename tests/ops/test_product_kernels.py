"""The kernels of products are near their references, and compile for an H100 or H200."""

import re

import pytest
import torch
import triton

from moe_compile.ops.kernels import (
    grouped_product,
    pack_rows,
    product_operands,
    weight_gradient,
)
from moe_compile.ops.product_formats import ELEMENTS, FORMATS, refusal
from moe_compile.ops.scaled_products import QUANTIZE_ROWS, QUANTIZE_WEIGHT, SCALED_GROUPED_MM
from moe_compile.ops.wire_format import BLOCK, num_blocks, row_bytes
from tests.ops.hopper_code import (
    BLACKWELL,
    HOPPER,
    MOST_REGISTERS,
    THREADS,
    compile_for_hopper,
)
from tests.ops.kernel_values import hold
from tests.ops.product_values import PROPERTIES

WIDTHS = pytest.mark.parametrize("width", [2048, 2880, 7168])
SHARED = 227 * 1024
"""Most shared memory of a program on a Hopper GPU (CUDA's programming guide, table of sizes)."""
REGISTERS = 65536
"""Of a multiprocessor."""


@pytest.mark.gpu
@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
def test_values_on_a_gpu(check):
    hold(check)


@pytest.mark.gpu
def test_rows_are_multiplied_by_torch_if_rowwise():
    """On a GPU as on a CPU, but for the order of sums; rows of no group are zero."""
    offs = torch.tensor([0, 1, 130, 130, 200], dtype=torch.int32)
    rows, weight = torch.randn(210, 2880).bfloat16(), torch.randn(5, 2880, 160).bfloat16()
    operands = (*QUANTIZE_ROWS(rows, "rowwise"), *QUANTIZE_WEIGHT(weight, "rowwise"))
    expected = SCALED_GROUPED_MM(*operands, offs, "rowwise", torch.bfloat16)
    on_gpu = [*QUANTIZE_ROWS(rows.cuda(), "rowwise"), *QUANTIZE_WEIGHT(weight.cuda(), "rowwise")]
    found = SCALED_GROUPED_MM(*on_gpu, offs.cuda(), "rowwise", torch.bfloat16).cpu()
    assert (found.float() - expected.float()).norm() < 0.01 * expected.float().norm()
    assert not found[200:].any()
    for ours, theirs in zip(on_gpu, operands, strict=True):
        assert torch.equal(ours.cpu().float(), theirs.float())


def test_torch_takes_the_operands_of_recipe_rowwise():
    """Its own checks of a product on a GPU, without one."""
    offs, rows, weight = torch.ones(5).int(), torch.randn(7, 2880), torch.randn(5, 2880, 160)
    for by in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        payload, scales = (one.to("meta") for one in QUANTIZE_ROWS(rows, "rowwise"))
        payload_of, scales_of = QUANTIZE_WEIGHT(by, "rowwise")
        found = torch._scaled_grouped_mm(
            payload, payload_of.to("meta"), scales, scales_of.to("meta"), offs=offs.to("meta"),
            out_dtype=torch.bfloat16,
        )  # fmt: skip
        assert found.shape == (7, 160)


def compile_product(
    width, *, columns=2048, experts=32, element="fp8e4nv", dtype="bf16", target=HOPPER
):
    pointers = {
        "rows": f"*{element}", "row_scales": "*fp32", "weight": "*fp8e4nv",
        "weight_scales": "*fp32", "ends": "*i32", "products": f"*{dtype}",
    }  # fmt: skip
    constants = {
        "WIDTH": width, "NUM_COLUMNS": columns, "NUM_GROUPS": experts,
        "GROUPS": triton.next_power_of_2(experts + 1), "ROWS": grouped_product.ROWS,
    }  # fmt: skip
    return compile_for_hopper(
        grouped_product.grouped_product_kernel, pointers, constants,
        num_warps=grouped_product.NUM_WARPS, num_stages=grouped_product.NUM_STAGES, target=target,
    )  # fmt: skip


@WIDTHS
@pytest.mark.parametrize(
    ("element", "ptx", "dtype"),
    [("fp8e4nv", "e4m3", "bf16"), ("fp8e5", "e5m2", "bf16"), ("fp8e4nv", "e4m3", "fp32")],
)
def test_products_run_on_tensor_cores_without_spills(width, element, ptx, dtype):
    found = compile_product(width, element=element, dtype=dtype)
    threads = 32 * grouped_product.NUM_WARPS
    assert found.stack == 0 and found.registers * threads <= REGISTERS
    stages = grouped_product.NUM_STAGES * (grouped_product.ROWS + BLOCK) * BLOCK
    assert stages <= found.shared <= SHARED
    steps = re.findall(rf"wgmma\.mma_async\S+m64n128k32\.f32\.{ptx}\.e4m3", found.ptx)
    assert len(steps) == BLOCK // 32  # one block of K, in steps of 32 bytes
    assert "mma.sync" not in found.ptx
    copies = re.findall(r"cp\.async\.cg\.shared\.global \[[^]]+\], \[[^]]+\], (0x10|16)", found.ptx)
    assert len(copies) == stages // threads // 16  # all operands, 16 bytes at a time


def test_recipe_blockwise_runs_on_tensor_cores_of_the_gpu_that_others_are_for():
    """A GPU that is refused mxfp8 and nvfp4, for want of kernels, is told to write it."""
    assert refusal(FORMATS["blockwise"], (10, 0)) is None
    found = compile_product(2048, target=BLACKWELL)
    assert found.stack == 0 and found.shared <= SHARED
    assert re.search(r"tcgen05\.mma\S*kind::f8f6f4", found.ptx) and "mma.sync" not in found.ptx


def test_each_block_is_added_up_outside_of_the_tensor_cores():
    """Every sum of a block starts from zero, and is then added by as many multiply-adds."""
    ptx = compile_product(7168).ptx
    elements = grouped_product.ROWS * BLOCK // (32 * grouped_product.NUM_WARPS)
    assert ptx.count("fma.rn.f32") == elements


@WIDTHS
@pytest.mark.parametrize(
    ("element", "ptx", "dtype"), [("fp8e4nv", "e4m3", "bf16"), ("fp8e5", "e5m2", "fp32")]
)
def test_gradients_of_weights_run_on_tensor_cores_without_spills(width, element, ptx, dtype):
    pointers = {
        "rows": "*fp8e4nv", "row_scales": "*fp32", "grads": f"*{element}", "grad_scales": "*fp32",
        "ends": "*i32", "gradient": f"*{dtype}",
    }  # fmt: skip
    constants = {"WIDTH": width, "NUM_COLUMNS": 2048, "NUM_GROUPS": 32, "GROUPS": 64}
    found = compile_for_hopper(
        weight_gradient.weight_gradient_kernel, pointers, constants,
        num_warps=weight_gradient.NUM_WARPS, num_stages=weight_gradient.NUM_STAGES,
    )  # fmt: skip
    threads = 32 * weight_gradient.NUM_WARPS
    assert found.stack == 0 and found.registers * threads <= REGISTERS
    stages = weight_gradient.NUM_STAGES * 2 * BLOCK * BLOCK
    assert stages <= found.shared <= SHARED
    steps = re.findall(rf"wgmma\.mma_async\S+m64n128k32\.f32\.e4m3\.{ptx}", found.ptx)
    assert len(steps) == BLOCK // 32  # one block of rows, in steps of 32 bytes
    assert "mma.sync" not in found.ptx
    copies = re.findall(r"cp\.async\.cg\.shared\.global \[[^]]+\], \[[^]]+\], (0x10|16)", found.ptx)
    assert len(copies) >= stages // threads // 16  # all operands, 16 bytes at a time
    assert found.ptx.count("fma.rn.f32") == BLOCK * BLOCK // threads  # blocks are added outside


def constants_of(element):
    largest, least, cast = pack_rows.element_constants(ELEMENTS[element])
    return {"LARGEST": largest, "LEAST_BITS": least, "ELEMENT": cast}


OPERAND = {"payload": "*u8", "scales": "*fp32"}


@WIDTHS
@pytest.mark.parametrize("by_column", [True, False])
def test_squares_are_read_along_memory_and_written_16_bytes_at_a_time(width, by_column):
    strides = (1, width) if by_column else (2048, 1)
    constants = {
        "WIDTH": width, "NUM_COLUMNS": 2048, "OF_EXPERT": 2048 * width,
        "OF_ROW": strides[0], "OF_COLUMN": strides[1],
    } | constants_of("e4m3")  # fmt: skip
    warps = product_operands.SQUARE_WARPS
    kernel, pointers = product_operands.quantize_squares_kernel, {"weight": "*bf16"} | OPERAND
    found = compile_for_hopper(kernel, pointers, constants, num_warps=warps)
    each = BLOCK * BLOCK // (32 * warps)
    assert found.loads == {16: 2 * each // 16} and found.stores == {16: each // 16, 4: 1}
    assert found.stack == 0 and found.registers <= MOST_REGISTERS


@WIDTHS
def test_columns_are_read_along_rows_and_written_16_bytes_at_a_time(width):
    constants = {"WIDTH": width, "NUM_GROUPS": 32, "GROUPS": 64} | constants_of("e4m3")
    warps = weight_gradient.QUANTIZE_WARPS
    pointers = {"rows": "*bf16", "ends": "*i32"} | OPERAND
    found = compile_for_hopper(
        weight_gradient.columns_by_block_kernel, pointers, constants, num_warps=warps
    )
    each = BLOCK * weight_gradient.COLUMNS.value // (32 * warps)
    assert found.loads[16] == 2 * each // 16 and found.stores[16] == each // 16
    assert found.stack == 0 and found.registers <= MOST_REGISTERS


@WIDTHS
def test_whole_rows_move_16_bytes_at_a_time(width):
    filled = triton.next_power_of_2(width)
    constants = {"WIDTH": width, "FILLED": filled} | constants_of("e4m3")
    kernel, pointers = product_operands.quantize_whole_kernel, {"rows": "*bf16"} | OPERAND
    found = compile_for_hopper(kernel, pointers, constants)
    each = filled // THREADS
    assert found.loads == {16: 2 * each // 16} and found.stores == {16: each // 16, 4: 1}
    assert found.stack == 0 and found.registers <= 2 * MOST_REGISTERS


@pytest.mark.parametrize("width", [2048, 7168])
@pytest.mark.parametrize("picked", [True, False], ids=["picked", "all"])
def test_splitting_messages_moves_16_bytes_at_a_time(width, picked):
    constants = {"WIDTH": width, "BLOCKS": num_blocks(width), "MESSAGE": row_bytes(width)}
    pointers = {"messages": "*u8"} | OPERAND
    if picked:
        pointers["index"] = "*i64"
    else:
        constants["index"] = None
    found = compile_for_hopper(product_operands.split_messages_kernel, pointers, constants)
    each = pack_rows.TILE_BLOCKS.value * BLOCK // THREADS // 16
    assert found.loads[16] == each and set(found.loads) == ({16, 8, 4} if picked else {16, 4})
    assert found.stores == {16: each, 4: 1}
    assert found.stack == 0 and found.registers <= MOST_REGISTERS
