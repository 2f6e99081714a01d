"""`python -m benchmarks.convergence FOLDER`: does training in eight bits learn as well as bf16?

Trains the debug DeepSeek-V3, and a wider one, on two ranks of this machine, once per seed and way,
on the same text in the same order. Jobs that FOLDER has are not run again: after an interruption
give the same command. Compared are the seeds of which every way has ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.convergence import compare
from benchmarks.convergence.jobs import (
    BASELINE,
    COMMON,
    CONFIG,
    MODELS,
    WAYS,
    Ended,
    Job,
    Model,
    ended,
    train,
)
from benchmarks.convergence.picture import draw
from moe_compile.report.page import write_whole
from moe_compile.report.provenance import recorded_command


def main() -> int:
    """Train what is missing, print and write the comparison; returns 1 where it misses a bar."""
    arguments = _arguments()
    jobs = [
        Job(model=model, way=way, seed=seed, steps=arguments.steps)
        for model in MODELS
        if model.name in arguments.models
        for seed in arguments.seeds
        for way in WAYS
    ]
    if not arguments.compare:
        train_missing(jobs, arguments.folder)
    found = {job: kept for job in jobs if (kept := ended(job, arguments.folder)) is not None}
    report = report_of(jobs, found)
    report["command"] = recorded_command("benchmarks.convergence", sys.argv[1:])
    _print(report)
    if arguments.json:
        write_whole(arguments.json, json.dumps(report) + "\n")
        if report["losses"]:
            draw(report["losses"], BASELINE.name, arguments.json.with_suffix(".png"))
    bars = [one[bar] for rows in report["comparisons"].values() for one in rows.values()
            for bar in ("is_close", "is_level")]  # fmt: skip
    return 0 if bars and all(bars) else 1


def train_missing(jobs: Sequence[Job], folder: Path) -> None:
    """Train, one after another, the jobs that have not ended, and say how long it takes."""
    known = {job: kept for job in jobs if (kept := ended(job, folder)) is not None}
    for job in jobs:
        if job in known:
            continue
        left = left_s([one for one in jobs if one not in known], known)
        about = f", about {left / 60.0:.0f} min left" if left else ""
        sys.stderr.write(f"{len(known)} of {len(jobs)} jobs have ended{about}; next {job.name}\n")
        known[job] = train(job, folder)
        sys.stderr.write(
            f"{job.name}: loss {compare.end_of(known[job].losses):.4f}, {known[job].took_s:.0f} s\n"
        )


def left_s(missing: Iterable[Job], known: Mapping[Job, Ended]) -> float:
    """Return about how many seconds jobs will take; 0 where none has ended."""
    if not known:
        return 0.0
    times = {model: [k.took_s for job, k in known.items() if job.model == model]
             for model in MODELS}  # fmt: skip
    unit = statistics.median(kept.took_s / job.model.cost for job, kept in known.items())
    each = {m: statistics.median(t) if t else unit * m.cost for m, t in times.items()}
    return sum(each[job.model] for job in missing)


def report_of(jobs: Sequence[Job], found: Mapping[Job, Ended]) -> dict[str, Any]:
    """Return losses and comparisons of the jobs that have ended, as plain data."""
    losses: dict[str, Any] = {}
    comparisons: dict[str, Any] = {}
    for model in dict.fromkeys(job.model for job in jobs):
        runs = _losses_of(model, found)
        if len(runs[BASELINE.name]) < compare.SEEDS[0]:
            continue
        losses[model.title] = runs
        comparisons[model.title] = {
            way.name: asdict(compare.compare(runs[way.name], runs[BASELINE.name]))
            for way in WAYS
            if way is not BASELINE
        }
    machines = [
        {key: value for key, value in kept.machine.items() if key != "load_average"}
        for kept in found.values()
    ]
    return {
        "machines": [m for n, m in enumerate(machines) if m not in machines[:n]],
        "config": str(CONFIG),
        "settings": dict(COMMON),
        "models": {model.title: dict(model.settings) for model in MODELS},
        "ways": {way.name: dict(way.options) for way in WAYS},
        "bars": {
            "last": compare.LAST, "share": compare.SHARE,
            "trend": compare.TREND, "confidence": compare.CONFIDENCE,
        },
        "missing": [job.name for job in jobs if job not in found],
        "rewrites": {job.name: kept.rewrites for job, kept in found.items()},
        "comparisons": comparisons,
        "losses": losses,
    }  # fmt: skip


def _losses_of(model: Model, found: Mapping[Job, Ended]) -> dict[str, dict[int, list[float]]]:
    """Return the losses of each way, of seeds of which every way has ended."""
    runs: dict[str, dict[int, list[float]]] = {way.name: {} for way in WAYS}
    for job, kept in found.items():
        if job.model == model:
            runs[job.way.name][job.seed] = kept.losses
    whole = set.intersection(*map(set, runs.values()))
    return {name: {s: by[s] for s in sorted(whole)} for name, by in runs.items()}


def _print(report: Mapping[str, Any]) -> None:
    console = Console(width=120)
    for title, rows in report["comparisons"].items():
        seeds = len(report["losses"][title][BASELINE.name])
        spread = next(iter(rows.values()))["spread"]
        title = f"{title}, {seeds} seeds; bf16 has {spread:.4f} between seeds"
        table = Table(title=title, box=box.MARKDOWN)
        for name in ("", "loss", "- bf16's", "close", f"trend in {compare.TREND} steps", "level"):
            table.add_column(name, justify="left" if not name else "right")
        for way, one in rows.items():
            table.add_row(
                way,
                f"{one['loss']:.4f}",
                f"{one['difference']:+.4f} +- {one['difference_error']:.4f}",
                "yes" if one["is_close"] else "no",
                f"{one['slope']:+.4f} +- {one['slope_error']:.4f}",
                "yes" if one["is_level"] else "no",
            )
        console.print(table)
    if report["missing"]:
        console.print(f"{len(report['missing'])} jobs have not ended")
    if not report["comparisons"]:
        console.print(f"nothing to compare yet: every way has to end for {compare.SEEDS[0]} seeds")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("folder", type=Path, help="losses of each job that has ended lie here")
    parser.add_argument("--models", nargs="+", default=[model.name for model in MODELS],
                        choices=[model.name for model in MODELS])  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--compare", action="store_true", help="train nothing")
    parser.add_argument("--json", type=Path, help="write all here, and a picture beside it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
