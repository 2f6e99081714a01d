"""`python -m benchmarks.link.overlap`: what each variant of a layer or block hides.

Every rank is a process of this machine; the link between them is emulated (emulated_link.py) and
its bandwidth is set so that communication takes half to four times what compute takes. With
--preset nodes ranks share nodes: one link inside them, and one between them whose bandwidth is set.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.link.cases import PRESETS, RATIOS, Case, Preset
from benchmarks.link.clocks import CLOCKS
from benchmarks.link.measure import Job, measure_case
from benchmarks.link.post_board import create_board
from benchmarks.link.results import header_of_case, rows_of, with_other_cases
from benchmarks.link.table import print_case, print_head
from moe_compile.report.provenance import describe_machine, recorded_command
from moe_compile.testing.rank_pool import RankFailure, RankPool

CACHE: Final = Path("outputs") / "benchmark_cache"
WIDTH: Final = 170
"""Columns of the table, whatever the terminal's."""

ENVIRONMENT: Final[Mapping[str, str]] = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
}
"""Of every rank. One thread, since virtual time counts one. glibc keeps freed memory: else every
step faults its tensors in again, chunks less so than whole tensors."""


def main() -> int:
    """Run a preset; returns 1 when a case failed."""
    arguments = _arguments()
    preset = _narrowed(PRESETS[arguments.preset], arguments)
    os.environ.update(ENVIRONMENT)
    console = Console(width=WIDTH)
    head = {
        "command": recorded_command("benchmarks.link.overlap", sys.argv[1:]),
        "clock": arguments.clock,
        "machine": describe_machine(),
        "environment": dict(ENVIRONMENT),
    }
    print_head(console, head)
    report: dict[str, Any] = {**head, "cases": [], "rows": []}
    began = time.monotonic()
    for case in preset.cases:
        if arguments.case in (None, case.name):
            _run_case(console, case, preset, arguments, report)
    report["seconds"] = round(time.monotonic() - began, 1)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        if arguments.case and arguments.json.exists():
            report = with_other_cases(report, json.loads(arguments.json.read_text()))
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any("error" in case for case in report["cases"]) else 0


def _run_case(
    console: Console,
    case: Case,
    preset: Preset,
    arguments: argparse.Namespace,
    report: dict[str, Any],
) -> None:
    sys.stderr.write(f"{case.name}: starting {case.num_ranks} ranks\n")
    with tempfile.TemporaryDirectory(prefix="megamoe-overlap-") as folder:
        job = Job(
            case=case,
            preset=preset,
            clock=arguments.clock,
            folder=Path(folder),
            cache=arguments.cache.resolve(),
        )
        create_board(job.folder / "posts", case.num_ranks)
        try:
            with RankPool(case.num_ranks, timeout_s=preset.timeout_s) as pool:
                result = pool.run(measure_case, job)[0]
        except RankFailure as error:
            console.print(f"{case.name} failed: {error}", style="red", markup=False)
            report["cases"].append({**asdict(case), "error": str(error)})
            return
    rows = rows_of(job, result)
    head = {
        **header_of_case(job, result),
        "command": report["command"],
        "megamoe": report["machine"]["megamoe"],
    }
    print_case(console, head, rows)
    report["cases"].append(head)
    report["rows"] += [asdict(row) for row in rows]


def _narrowed(preset: Preset, arguments: argparse.Namespace) -> Preset:
    """Return the preset with the ratios and, besides the baseline, the variants asked for."""
    if arguments.ratios:
        preset = replace(preset, ratios=tuple(arguments.ratios))
    if arguments.variants:
        asked = {preset.baseline, *arguments.variants}
        preset = replace(preset, variants=tuple(name for name in preset.variants if name in asked))
    return preset


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.link.overlap", description=__doc__)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="quick")
    parser.add_argument("--case", help="of the preset's cases only this one")
    parser.add_argument("--ratios", nargs="+", choices=RATIOS, help="of the preset's only these")
    parser.add_argument(
        "--variants", nargs="+", help="of the preset's only these, and the baseline"
    )
    parser.add_argument(
        "--json", type=Path, help="write the results here as well; --case keeps the other cases"
    )
    parser.add_argument(
        "--clock",
        choices=sorted(CLOCKS),
        default="virtual",
        help="virtual: CPU time plus modelled waits; wall: a check, on a quiet machine",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=CACHE,
        help="compiled code and hardware profiles, kept from run to run (default: %(default)s)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
