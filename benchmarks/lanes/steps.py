"""What a lane runs: one command a step, and what its log says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LEAST: Final = "2.11.0"
"""The least torch, and that of many GPU machines: it runs the GPU check's parts for CPUs too."""
LANES: Final = (LEAST, "2.12.1", "2.13.0", "2.14.1", "2.15.0")
FOLDERS: Final = (
    "torch_quirks",
    "graph",
    "regions",
    "proof",
    "ops",
    "recompute",
    "passes",
    "backend",
    "equivalence",
)
"""Of tests: what reads, proves and rewrites graphs, what compiles them, and operators."""
CUDA_PROGRAMS: Final = ("layer-ep8", "deepseek-16b-ep8", "qwen3-ep8-tp2")
QUICK: Final = "not slow and not exhaustive and not gpu and not multigpu"
RECIPE: Final = "torchtitan_integration/configs/deepseek_v3_debug_cpu.toml"
LOGS: Final = Path("outputs/lanes")
EXAMPLE: Final = "example.py"
REPORT: Final = "report.json"
STEPS: Final = 10
STEP: Final = re.compile(r"step:\s+(\d+)\s+loss:\s+(\S+)\s")
APART: Final = 0.02
"""Most that a loss may be off eager's, as a part of it: experts multiply in bfloat16."""

IMPORTS: Final = """
import torch, moe_compile.backend, moe_compile.cli, passes.pipeline, torchtitan_integration
print("torch", torch.__version__)
"""
Judge = Callable[[Path], str]
"""Reads a lane's folder of logs; returns what to keep. Raises ValueError where it is bad."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A command of the lane's interpreter."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    judge: Judge

    @property
    def log(self) -> str:
        """Return the name of its log."""
        return f"{self.name.replace(' ', '_')}.log"


def steps_of(version: str, workers: int) -> tuple[Step, ...]:
    """Return the steps of a lane, the quickest first."""
    pytest = ("-m", "pytest", "-q", "-n", str(workers), "--dist", "loadfile", "-m", QUICK)
    found = [
        _step("import", ("-c", IMPORTS), 600),
        _step("example", ("-m", "torch.distributed.run", *_of_example()), 1200, chunks_of_example),
        _step("recipe eagerly", _recipe("--compile.no-enable"), 2400),
        _step("recipe", _recipe(), 3600, _losses_of_eager),
        *(_step(f"tests {name}", (*pytest, f"tests/{name}"), 5400) for name in FOLDERS),
        _step("cuda code", _of_cuda(), 5400, lambda _: f"{len(CUDA_PROGRAMS)} programs"),
    ]
    if version == LEAST:
        gpu = (*pytest, "tests/benchmarks/test_gpu_check.py")
        found.append(_step("gpu check without a gpu", gpu, 3600))
    return tuple(found)


def example() -> str:
    """Return the README's example, the one that is run by torchrun; its report is a log."""
    blocks = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    (found,) = (block for block in blocks if "torchrun" in block)
    return str(found).replace('"report.json"', f'"{LOGS / REPORT}"')


def chunks_of_example(folder: Path) -> str:
    """Return in how many chunks the layer ran. Raises ValueError where it ran whole."""
    report = folder.parent / REPORT
    regions = json.loads(report.read_text())["regions"] if report.exists() else []
    report.unlink(missing_ok=True)  # that of the next lane is another
    (chunks,) = [r["num_chunks"] for r in regions] or [1]
    if chunks == 1:
        raise ValueError("the layer was not chunked")
    return f"{chunks} chunks"


def losses_in(log: str) -> dict[int, float]:
    """Return the loss of each step that torchtitan printed."""
    return {int(step): float(loss) for step, loss in STEP.findall(log)}


def farthest(losses: Mapping[int, float], expected: Mapping[int, float]) -> float:
    """Return how far a loss is off, at most, as a part of it. Raises ValueError for other steps."""
    if losses.keys() != expected.keys() or len(expected) != STEPS:
        raise ValueError(f"steps {sorted(losses)} of {sorted(expected)}, {STEPS} wanted")
    return max(abs(losses[step] - of) / of for step, of in expected.items())


def _step(
    name: str, arguments: tuple[str, ...], limit_s: float, judge: Judge | None = None
) -> Step:
    return Step(name=name, arguments=arguments, limit_s=limit_s, judge=judge or (lambda _: ""))


def _recipe(*flags: str) -> tuple[str, ...]:
    steps = ("--training.steps", str(STEPS))
    return ("-m", "moe_compile.cli", "train", "--verbose", RECIPE, *steps, *flags)


def _of_example() -> tuple[str, ...]:
    return ("--standalone", "--nproc-per-node", "2", str(LOGS / EXAMPLE))


def _of_cuda() -> tuple[str, ...]:
    return ("-m", "benchmarks.cuda", *CUDA_PROGRAMS, "--chunks", "2")


def _losses_of_eager(folder: Path) -> str:
    logs = ("recipe.log", "recipe_eagerly.log")
    losses, expected = (losses_in((folder / log).read_text()) for log in logs)
    off = farthest(losses, expected)
    if off > APART:
        raise ValueError(f"a loss is {off:.2%} off eager's, {APART:.0%} at most")
    return f"{off:.2%}"
