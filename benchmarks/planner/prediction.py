"""`python -m benchmarks.planner.prediction`: the planner's predictions against steps that were run.

Contract
    Predicted is the time that the planner decides by, and its own decision. Measured is a step of
    the compiled layer, its nodes in the order the scheduler pinned, over the emulated link: values
    and messages are real, durations are those of the cost model at the sizes that occurred.
    Of a measured step the prediction knows nothing but what the setting states.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.link.post_board import create_board
from benchmarks.planner.held_setting import Held, hold_all
from benchmarks.planner.prediction_settings import SETTINGS, Setting
from moe_compile.report.provenance import describe_machine, recorded_command
from moe_compile.testing.rank_pool import RankPool

TIMEOUT_S: Final = 1800.0
WIDTH: Final = 120


def run_settings(settings: Sequence[Setting]) -> Iterator[list[Held]]:
    """Return what rank 0 saw of each setting, by number of ranks."""
    for num_ranks in sorted({s.case.num_ranks for s in settings}):
        alike = [s for s in settings if s.case.num_ranks == num_ranks]
        with (
            tempfile.TemporaryDirectory(prefix="megamoe-prediction-") as folder,
            RankPool(num_ranks, timeout_s=TIMEOUT_S) as pool,
        ):
            board = Path(folder) / "posts"
            create_board(board, num_ranks)
            yield from pool.run(hold_all, alike, board)[0]


def summary(held: Sequence[Held]) -> dict[str, Any]:
    """Return the errors over all steps, and what the planner's choices cost."""
    errors = [abs(h.error) for h in held]
    choices = [choice_of(list(group)) for _, group in itertools.groupby(held, key=_setting)]
    return {
        "settings": len(choices),
        "steps": len(held),
        "mape": statistics.mean(errors),
        "largest_error": max(errors),
        "largest_regret": max(c["regret"] for c in choices),
        "mean_regret": statistics.mean(c["regret"] for c in choices),
        "slowest_against_one_chunk": max(c["against_one_chunk"] for c in choices),
        "best_chosen": sum(not c["regret"] for c in choices),
    }


def choice_of(held: Sequence[Held]) -> dict[str, float]:
    """Return by which share the choice is slower than the best number measured, and than one."""
    ms = {h.num_chunks: h.measured_ms for h in held}
    chosen = ms[held[0].chosen]
    return {"regret": chosen / min(ms.values()) - 1.0, "against_one_chunk": chosen / ms[1] - 1.0}


def _setting(held: Held) -> tuple[str, str]:
    return held.name, held.ratio


def main() -> int:
    """Run all settings, print them, write the JSON asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner.prediction", description=__doc__
    )
    parser.add_argument(
        "--setting", nargs="+", help="only those with these names; --json keeps the others"
    )
    parser.add_argument("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    known = [s for s in SETTINGS if not arguments.setting or s.case.name in arguments.setting]
    began = time.monotonic()
    held = [h for found in run_settings(known) for h in found]
    if arguments.setting and arguments.json and arguments.json.exists():
        held = _with_others(held, json.loads(arguments.json.read_text())["rows"])
    report = {
        "command": recorded_command("benchmarks.planner.prediction", sys.argv[1:]),
        "machine": describe_machine(),
        "seconds": round(time.monotonic() - began, 1),
        "summary": summary(held),
        "settings": [asdict(s) for s in SETTINGS if s.case.name in {h.name for h in held}],
        "rows": [{**asdict(h), "error": h.error} for h in held],
    }
    _print(held, report["summary"])
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _with_others(held: Sequence[Held], rows: Sequence[dict[str, Any]]) -> list[Held]:
    """Return `held` and, of the rows of a file, those of other settings."""
    new = {h.name for h in held}
    rows = [{k: v for k, v in row.items() if k != "error"} for row in rows]
    kept = [Held(**row) for row in rows if row["name"] not in new]
    place = [s.case.name for s in SETTINGS].index
    return sorted([*kept, *held], key=lambda h: place(h.name))


def _print(held: Sequence[Held], summed: dict[str, Any]) -> None:
    table = Table(title="Steps on the emulated device and link, ms; * is the planner's choice")
    for heading in ("setting", "ranks", "comp:comm", "N", "predicted", "measured", "error"):
        table.add_column(heading)
    for h in held:
        number = f"{h.num_chunks}{'*' if h.num_chunks == h.chosen else ''}"
        times = (f"{h.predicted_ms:.2f}", f"{h.measured_ms:.2f}", f"{h.error:+.1%}")
        table.add_row(h.name, str(h.ranks), h.ratio, number, *times)
    console = Console(width=WIDTH)
    console.print(table)
    for key, value in summed.items():
        console.print(f"{key}: {value:.4f}" if isinstance(value, float) else f"{key}: {value}")


if __name__ == "__main__":
    sys.exit(main())
