"""The file of fuzzing campaigns: programs tried and failed, by seed.

Contract
    A run replaces an earlier one of the same seed and commit; the file is replaced whole.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from moe_compile.hardware.measure import cpu_name
from moe_compile.report.command import recorded_command
from moe_compile.testing.machine import revision
from moe_compile.testing.programs.coverage import Coverage


def add_record(path: Path, seed: int, coverage: Coverage, seconds: float) -> None:
    """Add a campaign to the JSON file at `path`, made where it does not exist."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    run = _run(seed, coverage, seconds)
    same = ("seed", "commit")
    kept = [old for old in runs if any(old[key] != run[key] for key in same)]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps({"runs": [*kept, run]}, indent=1) + "\n")
    partial.replace(path)


def covered(path: Path) -> Coverage:
    """Return features tried and rewritten by all campaigns of the file at `path`."""
    coverage = Coverage()
    for run in json.loads(path.read_text())["runs"]:
        for name, (tried, rewritten, failed) in run["features"].items():
            coverage.tried[name] += tried
            coverage.rewritten[name] += rewritten
            coverage.failed[name] += failed
    return coverage


def _run(seed: int, coverage: Coverage, seconds: float) -> dict[str, Any]:
    return {
        "seed": seed,
        "commit": revision(),
        "date": str(datetime.now(UTC).date()),
        "command": recorded_command("moe_compile.testing.fuzz", sys.argv[1:]),
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "minutes": round(seconds / 60, 1),
        "programs": coverage.num_valid,
        "rewritten": coverage.num_rewritten,
        "within_last_bits": coverage.num_may_differ,
        "failed": coverage.num_failed,
        "judged_twice": coverage.num_second,
        "by_kind": dict(coverage.kinds),
        "failures": [
            {key: failure[key] for key in ("kind", "number", "detail", "source")}
            for failure in coverage.failures
        ],
        "features": {
            name: [coverage.tried[name], coverage.rewritten[name], coverage.failed[name]]
            for name in sorted(coverage.tried)
        },
    }
