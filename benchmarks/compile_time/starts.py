"""Starts of the recipe that `make train` runs: the first, with empty caches, and a second.

Contract
    A start trains one step. CPU time is that of all its processes, compilers included; what the
    same start takes without compilation is measured beside it, and taken off.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from benchmarks.compile_time.one_compile import CONFIG, cpu_seconds

STAMP: Final = r"\[titan\] (\S+ \S+) - root - INFO - "
BEGAN: Final = re.compile(STAMP + "Training starts at step 1")
ENDED: Final = re.compile(STAMP + r"step:\s+1 ")
TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What one start took, seconds."""

    cpu_s: float
    """Of all processes."""
    wall_s: float
    step_1_s: float
    """Wall time of the first step, in which everything is compiled."""


def start_training(folder: Path, cache: Path, *flags: str) -> Start:
    """Start the recipe with its outputs in `folder` and compiled code in `cache`."""
    outputs = ["--job.dump_folder", str(folder), "--megamoe.report", str(folder / "report.json")]
    command = [sys.executable, "-m", "moe_compile.cli", "train", str(CONFIG), *outputs]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    cpu, wall = cpu_seconds(), time.monotonic()
    done = subprocess.run(
        [*command, "--training.steps", "1", *flags], env=environment, capture_output=True,
        text=True, errors="replace", timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    took = time.monotonic() - wall
    if done.returncode:
        raise RuntimeError(f"the job failed: {(done.stdout + done.stderr)[-3000:]}")
    log = done.stdout + done.stderr
    began, ended = (_first_time(pattern, log) for pattern in (BEGAN, ENDED))
    step_1_s = (ended - began).total_seconds()
    return Start(cpu_s=cpu_seconds() - cpu, wall_s=took, step_1_s=step_1_s)


def _first_time(pattern: re.Pattern[str], log: str) -> datetime:
    found = pattern.search(log)
    if found is None:
        raise RuntimeError(f"nothing like {pattern.pattern!r} was printed")
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f")
