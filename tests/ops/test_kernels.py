"""The kernels compute what the format says, and compile for an H100 or H200 as they were meant to."""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_compile.ops.kernels import gather_quantize_pack, gather_rows, unpack_dequantize
from moe_compile.ops.wire_format import BLOCK, num_blocks, row_bytes
from tests.ops.kernel_values import PROPERTIES

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
    signature = {name: pointers.get(name, "constexpr") for name in names} | {"num_rows": "i32"}
    compiled = triton.compile(
        ASTSource(
            kernel,
            signature,
            {(names.index(name),): value for name, value in constants.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
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


def message_constants(width):
    return {"WIDTH": width, "BLOCKS": num_blocks(width), "MESSAGE": row_bytes(width)}


def tile_bytes(element_bytes):
    """Return the bytes of a tile's columns that each thread moves."""
    return gather_quantize_pack.TILE_BLOCKS.value * BLOCK * element_bytes // THREADS


def test_values_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.kernel_values"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.gpu
@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
def test_values_on_a_gpu(check):
    check()


@pytest.mark.parametrize("width", [2048, 7168])
@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp16", 2), ("fp32", 4)])
@pytest.mark.parametrize("picked", [True, False])
def test_packing_moves_16_bytes_at_a_time(width, dtype, size, picked):
    pointers = {"rows": f"*{dtype}", "messages": "*u8"} | ({"index": "*i64"} if picked else {})
    constants = message_constants(width) | ({} if picked else {"index": None})
    found = compile_for_hopper(
        gather_quantize_pack.gather_quantize_pack_kernel, pointers, constants
    )
    assert found.loads[16] == tile_bytes(size) // 16
    assert set(found.loads) == ({16, 8} if picked else {16})  # 8: the index
    assert found.stores == {16: tile_bytes(1) // 16, 4: 1}  # 4: scales
    assert found.stack == 0 and found.registers <= MOST_REGISTERS
    assert "cvt.rn.satfinite.e4m3x2.f32" in found.ptx
    assert "div.rn.f32" in found.ptx and ".ftz" not in found.ptx


@pytest.mark.parametrize("width", [2048, 7168])
@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp16", 2), ("fp32", 4)])
@pytest.mark.parametrize("picked", [True, False])
def test_unpacking_moves_16_bytes_at_a_time(width, dtype, size, picked):
    pointers = {"rows": f"*{dtype}", "messages": "*u8"} | ({"index": "*i64"} if picked else {})
    constants = message_constants(width) | ({} if picked else {"index": None})
    found = compile_for_hopper(unpack_dequantize.unpack_dequantize_kernel, pointers, constants)
    assert found.loads[16] == tile_bytes(1) // 16
    assert set(found.loads) == ({16, 8, 4} if picked else {16, 4})  # 8: the index, 4: scales
    assert found.stores == {16: tile_bytes(size) // 16}
    assert found.stack == 0 and found.registers <= MOST_REGISTERS
    assert "cvt.rn.f16x2.e4m3x2" in found.ptx and ".ftz" not in found.ptx


@pytest.mark.parametrize("width", [2048, 7168])
def test_gathering_moves_16_bytes_at_a_time(width):
    words = width * 2 // 8
    chunk = gather_rows.CHUNK_BYTES // 8
    constants = {"WIDTH": words, "CHUNK": chunk, "CHUNKS": words // chunk}
    pointers = {"rows": "*i64", "index": "*i64", "gathered": "*i64"}
    found = compile_for_hopper(gather_rows.gather_rows_kernel, pointers, constants)
    accesses = gather_rows.TILE_CHUNKS.value * gather_rows.CHUNK_BYTES // THREADS // 16
    assert found.loads[16] == accesses and set(found.loads) == {16, 8}  # 8: the index
    assert found.stores == {16: accesses}
    assert found.stack == 0 and found.registers <= MOST_REGISTERS
