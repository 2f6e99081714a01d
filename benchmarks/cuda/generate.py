"""`python -m benchmarks.cuda.generate PROGRAM CHUNKS --out FOLDER`: write one program's code.

Contract
    Writes forward.py and backward.py, Inductor's wrappers; order.json, the order the scheduler
    chose; report.json; kernels.json, registers and spills where kernels were compiled; and
    compilation.json, the CPU seconds it took, which of the tensors it is given are weights, what
    hops send where routing is balanced, and the bytes that costs say each phase moves. No cache is
    used.
"""

from benchmarks.cuda.device_guard import load_guard

load_guard()  # before torch is imported

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.fx as fx
import triton
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

from benchmarks.cuda import fake_h100
from benchmarks.cuda.cases import CHUNKS, MODELS, PROGRAMS, Program
from benchmarks.cuda.letters import graph_letters
from benchmarks.cuda.programs import built
from moe_compile.backend import megamoe
from moe_compile.cost.amounts import amounts_of
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import is_launch, tensor_of
from moe_compile.plan.state import CompileState
from passes.pin_order import PinOrder

PHASES = ("forward", "backward")
SMALL = [
    Program(block=b, ep=8, is_captured=is_captured, products=products)
    for b in ("layer", *MODELS)
    for is_captured, products in ((False, "same"), (True, "same"), (False, "fp8_blockwise"))
]
KNOWN = {p.name: p for p in (*PROGRAMS, *SMALL)}


class Generated(Exception):
    """All code is there; nothing is to run."""


def generate(program: Program, chunks: int, folder: Path, options: dict[str, Any]) -> None:
    """Write the code of `program` in so many chunks."""
    codes: list[str] = []
    scheduled: list[tuple[str, float]] = []
    weights: list[int] = []
    pin = PinOrder.run

    def noting(self: PinOrder, graph: fx.Graph, state: Any) -> Any:
        if letters := graph_letters(graph):  # a mask's graph inside of attention has none
            scheduled.append((letters, _estimated_bytes(graph, state)))
        return pin(self, graph, state)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        nodes = [n for n in gm.graph.find_nodes(op="placeholder") if tensor_of(n) is not None]
        weights.extend(number for number, node in enumerate(nodes) if "_parameters_" in node.name)
        ours = {
            "megamoe.chunks": chunks,
            "megamoe.hardware": "h100",
            "megamoe.report": str(folder / "report.json"),
            **{f"megamoe.{name}": value for name, value in (program.options | options).items()},
            **program.settings,
        }
        megamoe(gm, inputs, options=ours)
        raise Generated

    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as cache,
        temporary_cache_dir(cache),
        mock.patch.object(GraphLowering, "save_output_code", codes.append),
        mock.patch.object(PinOrder, "run", noting),
        inductor_config.patch(force_disable_caches=True),
        functorch_config.patch(
            force_non_lazy_backward_lowering=True, graphsafe_rng_functionalization=False
        ),
        built(program, backend) as one,
    ):
        began = time.process_time()
        try:
            one.compile()
        except BackendCompilerFailed as failed:
            if not isinstance(failed.inner_exception, Generated):
                raise
        seconds = time.process_time() - began
        hop_rows = one.hop_rows(program, chunks)
    for phase, code in zip(PHASES, codes, strict=False):
        (folder / f"{phase}.py").write_text(code)
    phases = dict(zip(PHASES, scheduled, strict=False))
    _write(folder / "order.json", {phase: letters for phase, (letters, _) in phases.items()})
    _write(folder / "kernels.json", [kernel_figures(*one) for one in fake_h100.COMPILED])
    said = {
        "cpu_s": seconds,
        "torch": torch.__version__,
        "weights": weights,
        "hop_rows": hop_rows,
        "estimated_bytes": {phase: nbytes for phase, (_, nbytes) in phases.items()},
    }
    _write(folder / "compilation.json", said)


def _estimated_bytes(graph: fx.Graph, state: CompileState) -> float:
    """Return the bytes that a graph moves by the costs it was scheduled by; no collectives."""
    sizes = NominalSizes(state.nominal_sizes)
    sizes.learn(graph)
    return sum(amounts_of(node, sizes).nbytes for node in graph.nodes if not is_launch(node))


def kernel_figures(name: str, ptx: str) -> dict[str, Any]:
    """Return what ptxas says of a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        said = _assembled(source)
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores", said)
    return {
        "name": name,
        "registers": int(registers[1]) if registers else 0,
        "spilled_bytes": int(spills[1]) if spills else 0,
    }


def _assembled(source: Path) -> str:
    """Return what the first assembler prints that knows the kernel's version of PTX.

    Triton takes the one of its own or of torch that is new enough: there may be three.
    """
    beside = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    tools = [*sorted(beside.glob("ptxas*")), Path(torch.__file__).parent / "bin" / "ptxas"]
    failed = []
    for tool in filter(Path.exists, tools):
        command = [str(tool), "-v", "--gpu-name", "sm_90a", str(source), "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stderr
        failed.append(f"{tool}: {done.stderr.strip()}")
    raise RuntimeError("no ptxas takes what Triton wrote: " + "; ".join(failed))


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate one program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda.generate", description=__doc__)
    parser.add_argument("program", choices=sorted(KNOWN))
    parser.add_argument("chunks", type=int, choices=CHUNKS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernels", action="store_true", help="compile Triton's kernels, too")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON")
    given = parser.parse_args(arguments)
    options = {n: json.loads(v) for n, _, v in (o.partition("=") for o in given.option)}
    fake_h100.install(compile_kernels=given.kernels)
    generate(KNOWN[given.program], given.chunks, given.out, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
