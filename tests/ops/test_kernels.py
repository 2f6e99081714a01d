"""The kernels compute what the format says and compile for an H100 or H200 as they should."""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_compile.ops.kernels import (
    gather_rows,
    pack_rows,
    sum_rows,
)
from moe_compile.ops.wire_format import BLOCK, num_blocks, row_bytes
from tests.ops.kernel_values import PROPERTIES, hold

ROOT = Path(__file__).parents[2]
HOPPER = GPUTarget("cuda", 90, 32)
MOST_REGISTERS = 64
"""Lets 1024 threads live on a multiprocessor of 65536 registers: half of all it can hold."""
THREADS = 128
ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[a-z][\w:]*)*?(?:\.v(\d))?\.b(\d+)")
"""As PTX writes it: ld.global.v4.b32, st.global.L1::evict_last.v2.b64, ..."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler made of one kernel."""

    loads: Counter
    """How many loads a thread does, by their width in bytes; so `stores`."""
    stores: Counter
    registers: int
    stack: int
    """Bytes that registers spill to, or local arrays take."""
    ptx: str


def compile_for_hopper(kernel, pointers, constants):
    """Compile as for tensors whose addresses 16 divides."""
    names = kernel.arg_names
    numbers = dict.fromkeys({"num_rows", "num_sources"} & {*names}, "i32")
    signature = {name: pointers.get(name, "constexpr") for name in names} | numbers
    aligned = [
        (names.index(name), *inside)
        for name, kind in pointers.items()
        for inside in ([()] if isinstance(kind, str) else [(n,) for n in range(len(kind))])
        if kind != ("i64",) * len(kind)  # first rows: numbers
    ]
    compiled = triton.compile(
        ASTSource(
            kernel,
            signature,
            {(names.index(name),): value for name, value in constants.items()},
            {place: [["tt.divisibility", 16]] for place in aligned},
        ),
        target=HOPPER,
        options={"num_warps": THREADS // 32},
    )
    ptx = compiled.asm["ptx"]
    widths = [(kind, int(many or 1) * int(bits) // 8) for kind, many, bits in ACCESS.findall(ptx)]
    registers, stack = resources(compiled.asm["cubin"])
    return Compiled(
        loads=Counter(width for kind, width in widths if kind == "ld"),
        stores=Counter(width for kind, width in widths if kind == "st"),
        registers=registers,
        stack=stack,
        ptx=ptx,
    )


def resources(cubin):
    """Return registers and bytes of stack per thread, as the machine code states them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    return int(found[0]), int(found[1])


def compile_between_rows_and_messages(kernel, width, dtype, picked):
    pointers = {"rows": f"*{dtype}", "messages": "*u8"}
    constants = {"WIDTH": width, "BLOCKS": num_blocks(width), "MESSAGE": row_bytes(width)}
    if picked:
        pointers["index"] = "*i64"
    else:
        constants["index"] = None
    return compile_for_hopper(kernel, pointers, constants)


def accesses(element_bytes):
    """Return how many accesses of 16 bytes each thread needs for a tile's columns."""
    return pack_rows.TILE_BLOCKS.value * BLOCK * element_bytes // THREADS // 16


FORMATS = pytest.mark.parametrize(
    ("dtype", "size", "width"),
    [("bf16", 2, 2048), ("bf16", 2, 7168), ("fp16", 2, 7168), ("fp32", 4, 7168)],
)
PICKED = pytest.mark.parametrize("picked", [True, False], ids=["picked", "all"])


def test_values_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.kernel_values"],
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
    kernel = pack_rows.gather_quantize_pack_kernel
    found = compile_between_rows_and_messages(kernel, width, dtype, picked)
    assert found.loads[16] == accesses(size)
    assert set(found.loads) == ({16, 8} if picked else {16})  # 8: the index
    assert found.stores == {16: accesses(1), 4: 1}  # 4: scales
    assert found.stack == 0 and found.registers <= MOST_REGISTERS


@FORMATS
@PICKED
def test_unpacking_moves_16_bytes_at_a_time(dtype, size, width, picked):
    kernel = pack_rows.unpack_dequantize_kernel
    found = compile_between_rows_and_messages(kernel, width, dtype, picked)
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
    pack, unpack = (
        compile_between_rows_and_messages(kernel, 7168, "bf16", picked=True).ptx
        for kernel in (
            pack_rows.gather_quantize_pack_kernel,
            pack_rows.unpack_dequantize_kernel,
        )
    )
    assert "div.rn.f32" in pack and "cvt.rn.satfinite.e4m3x2.f32" in pack
    assert "cvt.rn.f16x2.e4m3x2" in unpack
    assert not re.search(r"\.ftz|\.approx|div\.full", pack + unpack)
