"""`python -m benchmarks.link.convergence`: does the quantised wire change what a model learns?

Trains the debug DeepSeek-V3 with torchtitan, once per seed and wire, on the same text in the same
order, and compares losses. A loss is the mean of the last 20 steps: one step's varies by its batch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from moe_compile.report.provenance import describe_machine, recorded_command

CONFIG: Final = Path("torchtitan_integration/configs/deepseek_v3_debug_cpu.toml")
STEP: Final = re.compile(r"step:\s+(\d+)\s+loss:\s+(\S+)")
LAST: Final = 20
"""Steps whose mean is compared."""
TIMEOUT_S: Final = 1800
BASELINE: Final = "bf16"
WIRES: Final[Mapping[str, Mapping[str, str]]] = {
    BASELINE: {},
    "fp8 dispatch": {"megamoe.dispatch_wire": "fp8"},
    "fp8 both": {"megamoe.dispatch_wire": "fp8", "megamoe.combine_wire": "fp8"},
}
COMMON: Final = {"training.mixed_precision_param": "bfloat16", "metrics.log_freq": "1"}


def main() -> int:
    """Train all, print and write the comparison; returns 1 when a job failed."""
    arguments = _arguments()
    losses: dict[str, dict[str, list[float]]] = {}
    for wire, options in WIRES.items():
        for seed in arguments.seeds:
            sys.stderr.write(f"{wire}, seed {seed}: {arguments.steps} steps\n")
            found = _train({**options, "debug.seed": str(seed)}, arguments.steps)
            losses.setdefault(wire, {})[str(seed)] = found
    rows = _compare(losses)
    for row in rows:
        sys.stdout.write(
            f"seed {row['seed']}  {row['wire']:13} loss {row['loss']:.4f}  "
            f"{100 * row['against_bf16']:+.3f}% of bf16's\n"
        )
    report = {
        "command": recorded_command("benchmarks.link.convergence", sys.argv[1:]),
        "machine": describe_machine(),
        "config": str(CONFIG),
        "steps": arguments.steps,
        "settings": COMMON,
        "wires": WIRES,
        "compared": f"mean loss of the last {LAST} steps",
        "rows": rows,
        "losses": losses,
    }
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report) + "\n")
        _plot(losses, arguments.json.with_suffix(".png"))
    return 0


def _train(settings: Mapping[str, str], steps: int) -> list[float]:
    """Return the loss of every step; raises RuntimeError when the job failed."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = {
            **COMMON,
            **settings,
            "training.steps": str(steps),
            "job.dump_folder": folder,
            "megamoe.report": "",
        }
        command = [sys.executable, "-m", "moe_compile.cli", "train", str(CONFIG)]
        command += [part for key, value in chosen.items() for part in (f"--{key}", value)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    found = {int(step): float(loss) for step, loss in STEP.findall(done.stdout + done.stderr)}
    if done.returncode or len(found) != steps:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return [found[step] for step in sorted(found)]


def _compare(losses: Mapping[str, Mapping[str, list[float]]]) -> list[dict[str, Any]]:
    rows = []
    for wire, by_seed in losses.items():
        for seed, values in by_seed.items():
            loss, base = _end(values), _end(losses[BASELINE][seed])
            rows.append(
                {"wire": wire, "seed": seed, "loss": loss, "against_bf16": loss / base - 1.0}
            )
    return rows


def _end(values: list[float]) -> float:
    return sum(values[-LAST:]) / len(values[-LAST:])


def _plot(losses: Mapping[str, Mapping[str, list[float]]], path: Path) -> None:
    figure, (whole, difference) = pyplot.subplots(1, 2, figsize=(11, 4))
    for wire, by_seed in losses.items():
        for number, (seed, values) in enumerate(by_seed.items()):
            colour = f"C{list(losses).index(wire)}"
            label = wire if number == 0 else None
            whole.plot(values, color=colour, linewidth=0.7, label=label)
            if wire != BASELINE:
                base = losses[BASELINE][seed]
                gap = [100 * (a / b - 1) for a, b in zip(values, base, strict=True)]
                difference.plot(gap, color=colour, linewidth=0.7, label=label)
    whole.set(xlabel="step", ylabel="loss", title="debug DeepSeek-V3, three seeds")
    difference.set(xlabel="step", ylabel="% of bf16's loss", title="difference, same seed and step")
    for axes in (whole, difference):
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.link.convergence", description=__doc__
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", type=Path, help="write losses here, and a plot beside it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
