"""`python -m benchmarks.measured_waits`: what it costs to measure waits, on a CPU and on a GPU.

Contract
    On a CPU: one layer in two chunks, on one rank, compiled with measured waits and without. Steps
    of both take turns in one process, and who is first changes. Told is the median of the
    differences within pairs of steps, with its 95 % interval, and as a share of the median step
    without: by CPU time (user and system, of all threads), and by wall time. The step is short, so
    that the cost shows; a share of a longer step follows from the number of its waits.
    On a GPU: nothing runs. It is the number of waits in code that Inductor generates for a block of
    DeepSeek-V3 671B (`benchmarks/results/cuda_code.json`), times two events, times `RECORD_US`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

import moe_compile
from benchmarks.link.cases import Case
from benchmarks.link.layer import MoELayer
from moe_compile.check.paired import Estimate, estimate

LAYER: Final = Case(name="layer", num_ranks=1, tokens=256, experts=8, width=128, hidden=256)
RESULTS: Final = Path(__file__).parent / "results"
CODE: Final = RESULTS / "cuda_code.json"
RECORD_US: Final = (2.5, 5.2)
"""Microseconds to record an event with a time, by two measurements of others, least and most:
400,000 records a second on a V100 (github.com/NVIDIA/NVTX, issue 3), and 5.19 us for a record and
the query until it is over (github.com/ICLDisco/parsec, pull request 576)."""
EVENTS: Final = 2
"""Recorded for each wait: one before it, one after it."""
BLOCKS: Final = {
    "two chunks": ("deepseek-671b-ep64-checkpoint-tp2", "2"),
    "two parts, two hops, four slices and chunks, fp8": (
        "deepseek-671b-ep64-checkpoint-tp2-parts2-hops4-fp8",
        "4",
    ),
}
"""Program and number of chunks in `CODE`: the block of the 671B recipe, and that of most waits."""

Step = Callable[[], None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, compute, and print or write both."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measured_waits", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--pairs", type=int, default=400, help="pairs of steps")
    parser.add_argument("--codegen", choices=("inductor", "fx"), default="inductor")
    parser.add_argument("--json", type=Path, help="file for the results")
    asked = parser.parse_args(arguments)
    found = {"on_a_cpu": on_a_cpu(asked.pairs, asked.codegen), "on_a_gpu": on_a_gpu()}
    text = json.dumps(found, indent=1) + "\n"
    if asked.json is None:
        sys.stdout.write(text)
    else:
        asked.json.write_text(text)


def on_a_cpu(num_pairs: int, codegen: str) -> dict[str, Any]:
    """Return the cost of the waits of a step, by the clocks of the process and of the wall."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        layer = MoELayer(LAYER, dist.group.WORLD)
        steps = [step_of(layer, codegen, measures=measures) for measures in (True, False)]
        for step in (*steps, *steps):
            step()
        moe_compile.measured_waits()
        seconds = in_turn(steps, num_pairs)
        waits = moe_compile.measured_waits(steps=num_pairs)
    finally:
        dist.destroy_process_group()
    return {
        "codegen": codegen,
        "pairs": num_pairs,
        "waits": round(sum(one.per_step for one in waits)),
        **{name: cost_of(*both) for name, both in seconds.items()},
    }


def step_of(layer: MoELayer, codegen: str, *, measures: bool) -> Step:
    """Return a step of a layer that is compiled with measured waits, or without."""
    options = {"chunks": 2, "hardware": "cpu", "codegen": codegen, "measure_waits": measures}
    compiled = torch.compile(
        layer, backend="megamoe", options={f"megamoe.{k}": v for k, v in options.items()}
    )
    tokens = torch.randn(LAYER.tokens, LAYER.width, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        compiled(tokens).float().square().mean().backward()

    return step


def in_turn(steps: Sequence[Step], num_pairs: int) -> dict[str, list[list[float]]]:
    """Run two steps in turn; return, by clock, the seconds of each."""
    clocks = {"cpu": time.process_time, "wall": time.perf_counter}
    seconds: dict[str, list[list[float]]] = {name: [[], []] for name in clocks}
    for number in range(num_pairs):
        for which in (0, 1) if number % 2 else (1, 0):
            began = {name: clock() for name, clock in clocks.items()}
            steps[which]()
            for name, clock in clocks.items():
                seconds[name][which].append(clock() - began[name])
    return seconds


def cost_of(measured: Sequence[float], plain: Sequence[float]) -> dict[str, float]:
    """Return the median difference within pairs, its interval, and its share of a step without."""
    step = statistics.median(plain)
    found: Estimate = estimate([m - p for m, p in zip(measured, plain, strict=True)])
    return {
        "step_ms": step * 1e3,
        "cost_us": found.median * 1e6,
        "least_us": found.low * 1e6,
        "most_us": found.high * 1e6,
        "share": found.median / step,
    }


def on_a_gpu() -> dict[str, Any]:
    """Return, by block, its waits and the time of their events, in microseconds."""
    programs = json.loads(CODE.read_text())["programs"]
    return {
        name: cost_of_events(programs[program][chunks])
        for name, (program, chunks) in BLOCKS.items()
    }


def cost_of_events(code: dict[str, Any]) -> dict[str, float]:
    """Return the waits of generated code, forward and backward, and the time of their events."""
    waits = sum(code[phase]["order"].count("W") for phase in ("forward", "backward"))
    least, most = (EVENTS * waits * us for us in RECORD_US)
    return {"waits": waits, "least_us": least, "most_us": most}


if __name__ == "__main__":
    main()
