"""Inductor's kernel that makes rows and quantises them: `python -m` writes it, then interprets it.

`write FILE RECIPE` generates it for the H100 of `benchmarks.cuda`, `run FILE RECIPE` runs it in
Triton's interpreter and compares what it writes with the operator's reference. Each needs a process
of its own.
"""

import sys

if __name__ == "__main__" and sys.argv[1] == "write":
    from benchmarks.cuda.device_guard import load_guard

    load_guard()  # before torch is imported
    from benchmarks.cuda import fake_h100  # before megamoe is
elif __name__ == "__main__":
    import os

    os.environ["TRITON_INTERPRET"] = "1"

import re
from pathlib import Path
from unittest import mock

import torch
import triton
import triton.language as tl
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice
from torch._inductor.runtime.triton_helpers import math as tl_math
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.runtime import interpreter

from moe_compile.ops.scaled_products import quantize_rows
from passes.quantize_where_made import teach_inductor
from tests.ops.kernel_values import cast_through_torch

ROWS, WIDTH = 5, 256
BF16 = torch.bfloat16
FINE = 1 + 2.0**-7  # its square is no number of bfloat16


def program(gate, up, recipe):
    """Return rows, which others read as well, and what they are quantised to."""
    rows = torch.relu(gate) * up
    return rows, *torch.ops.megamoe.quantize_rows.default(rows, recipe)


def write(path, recipe):
    fake_h100.install(compile_kernels=False)
    assert teach_inductor()
    codes = []
    with FakeTensorMode(), mock.patch.object(GraphLowering, "save_output_code", codes.append):
        given = [torch.empty(ROWS, WIDTH, dtype=BF16, device=fake_h100.DEVICE) for _ in range(2)]
        compile_fx_inner(make_fx(lambda gate, up: program(gate, up, recipe))(*given), given)
    path.write_text(codes[-1])


def inputs():
    """Return numbers of all magnitudes, an infinity, a NaN, and blocks of zeros."""
    own = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(ROWS, WIDTH, generator=own) for _ in range(2))
    gate *= torch.randn(ROWS, 1, generator=own).mul(20).exp2()
    gate[1, 128:], gate[2, 3], gate[3, 200] = 0, torch.inf, torch.nan
    gate[4, :128], up[4, :128] = FINE, FINE
    return gate.to(BF16), up.to(BF16)


def run(path, recipe):
    interpreter._convert_float = cast_through_torch
    text = path.read_text()
    (kernel,) = re.findall(r"'''(.*?)'''", text, re.DOTALL)  # one makes and quantises
    source = path.with_name("kernel.py")  # Triton reads a kernel's source from its file
    source.write_text(kernel[kernel.index("@triton.jit") :])
    names = {"triton": triton, "tl": tl, "triton_helpers": triton_helpers}
    names |= {"libdevice": libdevice, "tl_math": tl_math}
    exec(compile(source.read_text(), str(source), "exec"), names)
    name, arguments = re.search(r"(triton_\w+)\.run\((.*?), stream", text).groups()
    made = dict(zip(("gate_1", "up_1"), inputs(), strict=True))
    allocation = r"(buf\d+) = empty_strided_cuda\((\(.*?\)), \(.*?\), (torch\.\w+)\)"
    for buffer, shape, dtype in re.findall(allocation, text):
        made[buffer] = torch.zeros(eval(shape), dtype=eval(dtype))
    given = [made[a] if a in made else int(a) for a in arguments.split(", ")]
    names[name][(given[-2],)](*given, XBLOCK=1)
    check({one.dtype: one for key, one in made.items() if key.startswith("buf")}, recipe)


def check(found, recipe):
    """Compare rows, payload and scales, each the one result of its type."""
    gate, up = inputs()
    rows = torch.relu(gate) * up
    payload, scales = quantize_rows(rows, recipe)
    assert rows.isnan().any() and (rows[4, :128].float() != FINE**2).all()
    torch.testing.assert_close(
        found[BF16], rows.view(found[BF16].shape), rtol=0, atol=0, equal_nan=True
    )
    values = found[torch.float8_e4m3fn].view(rows.shape)
    same = values.view(torch.uint8) == payload.view(torch.uint8)
    assert (same | (values.float().isnan() & payload.float().isnan())).all()
    torch.testing.assert_close(
        found[torch.float32].view(scales.shape), scales, rtol=0, atol=0, equal_nan=True
    )


if __name__ == "__main__":
    {"write": write, "run": run}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
