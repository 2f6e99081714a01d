"""`python -m benchmarks.lanes`: the product on every torch, one environment after another.

Contract
    A lane's environment is made by make, and removed when the lane is done. Results are written
    after every step; a step that passed on this lane is not run again, unless asked for. Exit
    status 1 where a step that was asked for has not passed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.lanes.steps import EXAMPLE, LANES, LOGS, Step, example, steps_of
from benchmarks.lanes.table import summary_line, write_page
from moe_compile.check.limited_process import run_limited

RESULTS: Final = Path("benchmarks/results/torch_lanes.json")
COMMAND: Final = "python -m benchmarks.lanes"
PAGE: Final = Path("docs/torches.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what has not passed yet, lane by lane; write results and page after every step."""
    names = [step.name for step in steps_of(LANES[0], 0)]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lanes", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"of {', '.join(LANES)}")
    parser.add_argument("--steps", nargs="+", choices=names, default=names, metavar="STEP")
    parser.add_argument("--again", action="store_true", help="run steps that passed before too")
    parser.add_argument("--keep", action="store_true", help="leave environments where they are")
    parser.add_argument("--workers", type=int, default=2, help="tests at a time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {"command": COMMAND, "lanes": {}}
    if options.results.exists():
        record = json.loads(options.results.read_text())
    LOGS.mkdir(parents=True, exist_ok=True)
    (LOGS / EXAMPLE).write_text(example())
    has_passed = True
    for version in options.versions or LANES:
        lane = record["lanes"].setdefault(version, {})
        asked = [s for s in steps_of(version, options.workers) if s.name in options.steps]
        for step in _missing(asked, lane, again=options.again):
            lane[step.name] = _run(step, version)
            _say(summary_line(version, step.name, lane[step.name]))
            options.results.write_text(json.dumps(record, indent=1) + "\n")
            write_page(record, options.page)
        if not options.keep:
            shutil.rmtree(_environment(version), ignore_errors=True)
        has_passed &= all(lane.get(step.name, {}).get("passed") for step in asked)
    return int(not has_passed)


def _missing(steps: Sequence[Step], lane: dict[str, Any], *, again: bool) -> list[Step]:
    return [s for s in steps if again or not lane.get(s.name, {}).get("passed")]


def _environment(version: str) -> Path:
    return Path(f".venv-torch-{version}")


def _run(step: Step, version: str) -> dict[str, Any]:
    """Run a step in the lane's environment, which is made where it is missing."""
    folder, began = LOGS / version, time.monotonic()
    environment = _environment(version)
    making = [f"VENV={environment}", f"TORCH={version}", f"PYTHON={sys.executable}"]
    made = subprocess.run(["make", f"{environment}/.ready", *making], check=False)
    if made.returncode:
        return _result(began, passed=False, said="the environment could not be made")
    command = [str(environment / "bin" / "python"), *step.arguments]
    own = {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONPATH": str(Path.cwd()),
    }
    status = run_limited(
        command, folder / step.log, step.limit_s, {**os.environ, **own}, keeps_output=True
    )
    if status != 0:
        said = f"not done after {step.limit_s:.0f} s" if status is None else f"exit status {status}"
        return _result(began, passed=False, said=f"{said}: {_last(folder / step.log)}")
    try:
        return _result(began, passed=True, said=step.judge(folder) or _last(folder / step.log))
    except ValueError as error:
        return _result(began, passed=False, said=str(error))


def _result(began: float, *, passed: bool, said: str) -> dict[str, Any]:
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return {"passed": passed, "said": said, "date": today, "s": round(time.monotonic() - began)}


def _last(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  (a command line)


if __name__ == "__main__":
    sys.exit(main())
