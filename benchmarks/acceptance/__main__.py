"""`python -m benchmarks.acceptance`: what becomes of layers and models of other packages.

Contract
    Each case runs in a process of its own, with a limit on its time. Results are written after
    every case; cases that are in the file already are not run again, unless asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.acceptance.cases import CASES
from benchmarks.acceptance.table import without_places, write_page
from moe_compile.check.limited_process import run_limited
from moe_compile.report.provenance import recorded_command

RESULTS: Final = Path("benchmarks/results/acceptance.json")
PAGE: Final = Path("docs/acceptance.md")
LIMIT_S: Final = 1500.0


def run_in_process(name: str, limit_s: float) -> dict[str, Any]:
    """Return a case's results; what ends or takes too long says so in them."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        command = [sys.executable, "-m", "benchmarks.acceptance.one_case", name, str(result)]
        if run_limited(command, log, limit_s, environment) is None:
            return {"name": name, "failure": f"not done after {limit_s:.0f} s"}
        if not result.exists():
            return {"name": name, "failure": log.read_text(errors="replace").strip()[-600:]}
        found: dict[str, Any] = json.loads(without_places(result.read_text()))
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then write the table."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.acceptance", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--cases", nargs="*", choices=names, default=names, metavar="NAME")
    parser.add_argument("--again", action="store_true", help="run cases that were run before too")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--workers", type=int, default=1, help="cases at a time")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a case")
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    kept = json.loads(options.results.read_text())["cases"] if options.results.exists() else []
    found = {one["name"]: one for one in kept}
    missing = [name for name in options.cases if options.again or name not in found]
    with ThreadPoolExecutor(options.workers) as pool:
        runs = {pool.submit(run_in_process, name, options.limit): name for name in missing}
        for number, done in enumerate(as_completed(runs), 1):
            found[runs[done]] = done.result()
            record = {
                "command": recorded_command("benchmarks.acceptance", given),
                "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
                "cases": [found[name] for name in names if name in found],
            }
            options.results.write_text(json.dumps(record, indent=1) + "\n")
            print(f"[{number}/{len(missing)}] {runs[done]}", flush=True)  # noqa: T201
    write_page(json.loads(options.results.read_text()), options.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
