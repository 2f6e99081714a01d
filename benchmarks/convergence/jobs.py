"""The training jobs that are compared, one at a time, and the losses that are kept of each.

Contract
    A job is the debug recipe on two ranks of this machine, with one model, way and seed. Jobs that
    differ in their way alone start from the same weights and read the same text in the same order.
    A job that has ended is never run again: its losses are in one file of the folder.
    A job in which megamoe rewrote less, or more, than its way says is an error.

Graphs run node by node (`codegen = "fx"`): operators round as in eager mode, and no job waits for a
compiler of C++.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from moe_compile.report.page import write_whole
from moe_compile.report.provenance import describe_machine

CONFIG: Final = Path("torchtitan_integration/configs/deepseek_v3_debug_cpu.toml")
STEP: Final = re.compile(r"step:\s+(\d+)\s+loss:\s+(\S+)")
COMMON: Final[Mapping[str, Any]] = {
    "training.mixed_precision_param": "bfloat16",
    "training.local_batch_size": 4,
    "megamoe.codegen": "fx",
    "megamoe.strict": True,
}
QUANTIZERS: Final = ("quantize_exchanges", "quantize_products", "feed_products")
"""Passes that make, or move, numbers of eight bits."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Model:
    """A model of the comparison."""

    name: str
    title: str
    settings: Mapping[str, Any]
    cost: float
    """Time of a job, as a multiple of the first model's: for the estimate before one has ended."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Way:
    """How rows travel and experts compute."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    passes: Mapping[str, int] = field(default_factory=dict)
    """Least number of rewrites of each of `QUANTIZERS` in a region; none of those not named."""


MODELS: Final = (
    Model(name="demo", title="dim 128, hidden 128", settings={}, cost=1.0),
    Model(
        name="wide",
        title="dim 256, hidden 256",
        settings={
            "model.flavor": "wide_cpu",
            "experimental.custom_import": "benchmarks.convergence.wide_model",
        },
        cost=2.5,
    ),
)
BASELINE: Final = Way(name="bf16")
CONTROL: Final = Way(name="bf16, rounded otherwise", options={"megamoe.chunk_by": "tokens"})
"""Nothing has eight bits, but gradients of weights are rounded chunk by chunk. What it differs by
from `BASELINE` is what any other rounding in bfloat16 makes of training."""
BOTH_WIRES: Final = {"megamoe.dispatch_wire": "fp8", "megamoe.combine_wire": "fp8"}
WAYS: Final = (
    BASELINE,
    CONTROL,
    Way(name="fp8 wires", options=BOTH_WIRES, passes={"quantize_exchanges": 2}),
    Way(
        name="fp8_rowwise",
        options={"megamoe.expert_compute": "fp8_rowwise"},
        passes={"quantize_products": 1},
    ),
    Way(
        name="fp8_blockwise",
        options={"megamoe.expert_compute": "fp8_blockwise"},
        passes={"quantize_products": 1},
    ),
    Way(
        name="fp8_blockwise, fed by the wire",
        options={"megamoe.expert_compute": "fp8_blockwise", "megamoe.dispatch_wire": "fp8"},
        passes={"quantize_exchanges": 1, "quantize_products": 1, "feed_products": 1},
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training run."""

    model: Model
    way: Way
    seed: int
    steps: int

    @property
    def name(self) -> str:
        """Return the name of its file."""
        way = re.sub(r"\W+", "-", self.way.name)
        return f"{self.model.name}-seed{self.seed}-{way}"

    @property
    def settings(self) -> dict[str, Any]:
        """Return what it sets in the recipe."""
        own = {"debug.seed": self.seed, "training.steps": self.steps}
        return {**COMMON, **self.model.settings, **self.way.options, **own}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """What is kept of a job that has ended."""

    settings: dict[str, Any]
    losses: list[float]
    """Of every step."""
    rewrites: dict[str, int]
    """How many each of `QUANTIZERS` did, and "regions": how many there are."""
    machine: dict[str, Any]
    took_s: float


def ended(job: Job, folder: Path) -> Ended | None:
    """Return what is kept of a job, None where it has not ended.

    Raises ValueError where its file is of a job with other settings.
    """
    path = folder / f"{job.name}.json"
    if not path.exists():
        return None
    kept = Ended(**json.loads(path.read_text()))
    if kept.settings != job.settings:
        raise ValueError(f"{path} is of a job with other settings: write another folder")
    return kept


def train(job: Job, folder: Path) -> Ended:
    """Train a job and keep its losses. Raises RuntimeError where it failed or rewrote too little.

    Needs torchtitan.
    """
    work = folder / "work" / job.name
    report, began = work / "report.json", time.monotonic()
    settings = {**job.settings, "job.dump_folder": str(work), "megamoe.report": str(report)}
    command = [sys.executable, "-m", "moe_compile.cli", "train", str(CONFIG), *flags_of(settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    found = {int(step): float(loss) for step, loss in STEP.findall(done.stdout)}
    if done.returncode or sorted(found) != list(range(1, job.steps + 1)):
        said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        raise RuntimeError(f"{shlex.join(command)}\n{said}")
    kept = Ended(
        settings=job.settings,
        losses=[found[step] for step in sorted(found)],
        rewrites=check_rewrites(json.loads(report.read_text()), job.way),
        machine=describe_machine(),
        took_s=round(time.monotonic() - began, 1),
    )
    write_whole(folder / f"{job.name}.json", json.dumps(asdict(kept)) + "\n")
    shutil.rmtree(work)
    return kept


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as flags of `megamoe train`."""
    written = ([f"--{key}"] if value is True else [f"--{key}", str(value)]
               for key, value in settings.items())  # fmt: skip
    return [flag for flags in written for flag in flags]


def check_rewrites(report: Mapping[str, Any], way: Way) -> dict[str, int]:
    """Return how often passes of eight bits rewrote something, by megamoe's report on a job.

    Raises RuntimeError where a region has less than `way` says, or more.
    """
    regions = len(report["regions"])
    done: Counter[str] = Counter()
    for one in report["passes"]:
        done[one["pass"]] += len(one.get("applied", ()))
    asked = {name: way.passes.get(name, 0) * regions for name in QUANTIZERS}
    wrong = [
        f"{name} rewrote {done[name]}, not {'0' if not least else f'at least {least}'}"
        for name, least in asked.items()
        if done[name] < least or (not least and done[name])
    ]
    if not regions or wrong:
        said = "; ".join(wrong) or "megamoe found no region"
        raise RuntimeError(f"{way.name}, {regions} regions: {said}")
    return {"regions": regions, **{name: done[name] for name in QUANTIZERS}}
