"""Compile a kernel for an H100 or H200, and read what the compiler made of it."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
BLACKWELL = GPUTarget("cuda", 100, 32)
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
    shared: int
    """Bytes of shared memory of a program."""
    ptx: str


def compile_for_hopper(kernel, pointers, constants, *, target=HOPPER, **options):
    """Compile as for tensors whose addresses 16 divides; `target` may name another GPU."""
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
        target=target,
        options={"num_warps": THREADS // 32} | options,
    )
    ptx = compiled.asm["ptx"]
    widths = [(kind, int(many or 1) * int(bits) // 8) for kind, many, bits in ACCESS.findall(ptx)]
    registers, stack = resources(compiled.asm["cubin"])
    return Compiled(
        loads=Counter(width for kind, width in widths if kind == "ld"),
        stores=Counter(width for kind, width in widths if kind == "st"),
        registers=registers,
        stack=stack,
        shared=compiled.metadata.shared,
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
