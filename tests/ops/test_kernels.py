"""The kernels compute what the format says and compile for an H100 or H200 as they should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton.language as tl

from moe_compile.ops.kernels import (
    gather_rows,
    pack_rows,
    sum_rows,
)
from moe_compile.ops.product_formats import ELEMENTS
from moe_compile.ops.wire_format import BLOCK, num_blocks, row_bytes
from tests.ops.hopper_code import MOST_REGISTERS, THREADS, compile_for_hopper
from tests.ops.kernel_values import PROPERTIES, hold
from tests.slow_parameters import slow_but

ROOT = Path(__file__).parents[2]


def compile_pack(width, dtype, picked=True, *, element="e4m3", is_message=True):
    """Compile what packs rows: into messages, or payload and scales apart."""
    blocks, message = num_blocks(width), row_bytes(width)
    largest, least, cast = pack_rows.element_constants(ELEMENTS[element])
    constants = {
        "WIDTH": width, "BLOCKS": blocks, "WRITTEN": width,
        "ROW": message if is_message else width,
        "ROW_OF_SCALES": message // 4 if is_message else blocks,
        "FIRST_SCALE": width // 4 if is_message else 0,
        "LARGEST": largest, "LEAST_BITS": least, "ELEMENT": cast,
    }  # fmt: skip
    pointers = {"rows": f"*{dtype}", "payloads": "*u8", "scales": "*fp32"}
    return compile_picking(pack_rows.gather_quantize_pack_kernel, pointers, constants, picked)


def compile_unpack(width, dtype, picked=True):
    pointers = {"rows": f"*{dtype}", "messages": "*u8"}
    constants = {"WIDTH": width, "BLOCKS": num_blocks(width), "MESSAGE": row_bytes(width)}
    return compile_picking(pack_rows.unpack_dequantize_kernel, pointers, constants, picked)


def compile_picking(kernel, pointers, constants, picked):
    """Compile with an index of the rows that are read, or without."""
    if picked:
        return compile_for_hopper(kernel, pointers | {"index": "*i64"}, constants)
    return compile_for_hopper(kernel, pointers, constants | {"index": None})


def accesses(element_bytes):
    """Return how many accesses of 16 bytes each thread needs for a tile's columns."""
    return pack_rows.TILE_BLOCKS.value * BLOCK * element_bytes // THREADS // 16


FORMATS = pytest.mark.parametrize(
    ("dtype", "size", "width"),
    [("bf16", 2, 2048), ("bf16", 2, 7168), ("fp16", 2, 7168), ("fp32", 4, 7168)],
)
PICKED = pytest.mark.parametrize("picked", [True, False], ids=["picked", "all"])


@pytest.mark.parametrize("values", slow_but(["kernel_values"], ["kernel_values", "product_values"]))
def test_values_in_the_interpreter(values):
    done = subprocess.run(
        [sys.executable, "-m", f"tests.ops.{values}"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.gpu
@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
def test_values_on_a_gpu(check):
    hold(check)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    rows = torch.randn(1, 7169, device="cuda", dtype=torch.bfloat16)
    index = torch.zeros(2**31 // 7168, device="cuda", dtype=torch.int64)
    copies = gather_rows.gather_rows(rows, index)
    assert copies.numel() > 2**31 and torch.equal(copies[-1], rows[0])
    del copies
    messages = pack_rows.gather_quantize_pack(rows, index)
    assert messages.numel() > 2**31 and torch.equal(messages[-1], messages[0])
    back = pack_rows.unpack_dequantize(messages, index + len(index) - 1, 7169, rows.dtype)
    assert torch.equal(back[-1], back[0])


@FORMATS
@PICKED
def test_packing_moves_16_bytes_at_a_time(dtype, size, width, picked):
    found = compile_pack(width, dtype, picked)
    assert found.loads[16] == accesses(size)
    assert set(found.loads) == ({16, 8} if picked else {16})  # 8: the index
    assert found.stores == {16: accesses(1), 4: 1}  # 4: scales
    assert found.stack == 0 and found.registers <= MOST_REGISTERS


@FORMATS
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_payload_and_scales_apart_move_as_messages_do(dtype, size, width, element):
    found = compile_pack(width, dtype, False, element=element, is_message=False)
    assert found.loads == {16: accesses(size)}
    assert found.stores == {16: accesses(1), 4: 1}  # 4: scales
    assert found.stack == 0 and found.registers <= MOST_REGISTERS
    assert f"cvt.rn.satfinite.{element}x2.f32" in found.ptx


@FORMATS
@PICKED
def test_unpacking_moves_16_bytes_at_a_time(dtype, size, width, picked):
    found = compile_unpack(width, dtype, picked)
    assert found.loads[16] == accesses(1)
    assert set(found.loads) == ({16, 8, 4} if picked else {16, 4})  # 8: the index, 4: scales
    assert found.stores == {16: accesses(size)}
    assert found.stack == 0 and found.registers <= MOST_REGISTERS


@pytest.mark.parametrize("width", [2048, 7168])
def test_gathering_moves_16_bytes_at_a_time(width):
    word, chunk = 8, gather_rows.CHUNK_BYTES
    constants = {"WIDTH": 2 * width // word, "CHUNK": chunk // word, "CHUNKS": 2 * width // chunk}
    pointers = {"rows": "*i64", "index": "*i64", "gathered": "*i64"}
    found = compile_for_hopper(gather_rows.gather_rows_kernel, pointers, constants)
    needed = gather_rows.TILE_CHUNKS.value * chunk // THREADS // 16
    assert found.loads[16] == needed and set(found.loads) == {16, 8}  # 8: the index
    assert found.stores == {16: needed}
    assert found.stack == 0 and found.registers <= MOST_REGISTERS


WIDTHS = pytest.mark.parametrize("width", [2048, 7168])


def by_places(matrices, width, dtype):
    """Return pointers and constants of a kernel that reads rows of so many matrices."""
    rows = {"rows": (f"*{dtype}",) * matrices, "starts": ("i64",) * (matrices - 1)}
    constants = {"WIDTH": width, "MOST": 8, "WIDE": tl.float32, "BLOCK": sum_rows.BLOCK}
    return {**rows, "places": "*i64"}, constants


@WIDTHS
@pytest.mark.parametrize(
    ("dtype", "to", "matrices", "weighted"),
    [
        ("bf16", "bf16", 1, False),
        ("bf16", "bf16", 4, True),
        ("bf16", "fp32", 2, False),
        ("fp16", "fp16", 1, True),
    ],
)
def test_summing_reads_16_bytes_of_each_row_at_a_time(width, dtype, to, matrices, weighted):
    pointers, constants = by_places(matrices, width, dtype)
    pointers["sums"] = f"*{to}"
    if weighted:
        pointers["weights"] = "*fp32"
    else:
        constants["weights"] = None
    found = compile_for_hopper(sum_rows.sum_rows_kernel, pointers, constants)
    assert found.loads == {16: 8, 8: 8} | ({4: 8} if weighted else {})  # 8: the places
    assert found.stores == {16: sum_rows.BLOCK * (4 if to == "fp32" else 2) // THREADS // 16}
    assert found.stack == 0 and found.registers <= MOST_REGISTERS


def test_no_number_of_rows_has_a_kernel_compiled_anew():
    """Triton makes a kernel of its own for 1 and for what 16 divides."""
    for number in (0, 1, 4, 15, 16, 17, 4096):
        (start,) = sum_rows.starts_of([torch.empty(number, 2), torch.empty(3, 2)])
        assert start != 1 and start % 16 and start >> 2 == number


@WIDTHS
@pytest.mark.parametrize(("dtype", "matrices"), [("bf16", 1), ("fp16", 4)])
def test_products_read_16_bytes_of_both_rows_at_a_time(width, dtype, matrices):
    pointers, constants = by_places(matrices, width, dtype)
    pointers |= {"others": f"*{dtype}", "dots": "*fp32"}
    found = compile_for_hopper(sum_rows.dot_rows_kernel, pointers, constants)
    assert found.loads == {16: 2 * -(-width // sum_rows.BLOCK), 8: 1}
    assert found.stack == 0 and found.registers <= MOST_REGISTERS


def test_arithmetic_is_ieee_division_and_the_hardwares_cast():
    """No flush of subnormals to zero, no approximate reciprocal, no emulated float8."""
    pack, unpack = compile_pack(7168, "bf16").ptx, compile_unpack(7168, "bf16").ptx
    assert "div.rn.f32" in pack and "cvt.rn.satfinite.e4m3x2.f32" in pack
    assert "cvt.rn.f16x2.e4m3x2" in unpack
    assert not re.search(r"\.ftz|\.approx|div\.full", pack + unpack)
