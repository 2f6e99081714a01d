"""Run a check's sections one after the other, each in its part of the time that is left.

Contract
    What passed before on the same machine and code is not run again. The summary is on disk after
    every section. A section that measured nothing has not passed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moe_compile.check.record import write_json

SUMMARY: Final = "summary.json"
PASSED: Final = "passed"
ALIKE: Final = ("gpu", "torch", "cuda", "triton")
"""Of a machine: where one of these is another, what passed before says nothing."""
GRACE_S: Final = 8.0
"""Before its end a section begins nothing more; then it is killed."""
RESERVE_S: Final = 10.0
"""For starting and for the table."""
LONGEST_S: Final = 480.0
"""What a section may take at most, however much time is left."""


def read_arguments(
    parser: argparse.ArgumentParser,
    promised: Mapping[str, float],
    devices: Sequence[str],
    *,
    budget_s: float,
) -> argparse.Namespace:
    """Return the command line of a check that has the sections `promised`, "cuda" its device.

    What every check takes joins what `parser` has.
    """
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--budget-s", type=float, default=budget_s, help="default: %(default)s")
    parser.add_argument(
        "--again", action="store_true", help="run sections too that FOLDER has passed results of"
    )
    parser.add_argument("--device", choices=devices, default="cuda")
    known = ",".join(promised)
    parser.add_argument(
        "--sections", type=lambda text: text.split(","), default=[*promised], help=f"of {known}"
    )
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.sections} - promised.keys()):
        parser.error(f"no section {', '.join(unknown)}; known: {known}")
    return arguments


def run_sections(
    out: Path,
    summary: dict[str, Any],
    promised: Mapping[str, float],
    budget_s: float,
    run: Callable[[str, float], dict[str, Any]],
) -> bool:
    """Run those of `promised`, seconds by name, that have not passed; return whether all have.

    `run` is given a name and seconds, and returns what became of the section.
    """
    began = time.monotonic()
    names = [name for name in promised if name not in summary["sections"]]
    for name in names:
        (out / f"{name}.json").unlink(missing_ok=True)
    open_s = sum(promised[name] for name in names)
    for name in names:
        left_s = budget_s - RESERVE_S - (time.monotonic() - began)
        section_s = min(LONGEST_S, left_s * promised[name] / open_s)
        open_s -= promised[name]
        out_of_time = {"status": "skipped", "why": "out of time"}
        found = run(name, section_s) if section_s > GRACE_S else out_of_time
        summary["sections"][name] = found
        summary["seconds"] = round(time.monotonic() - began, 1)
        write_json(out / SUMMARY, summary)
    return all(found["status"] == PASSED for found in summary["sections"].values())


def passed_before(
    out: Path, summary: Mapping[str, Any], alike: Sequence[str] = ("device", "sources")
) -> dict[str, Any]:
    """Return the sections of an earlier run that passed, on this machine, torch and code."""
    path = out / SUMMARY
    before = json.loads(path.read_text()) if path.exists() else {}
    if any(before.get(key) != summary[key] for key in alike) or any(
        before.get("machine", {}).get(key) != summary["machine"].get(key) for key in ALIKE
    ):
        return {}
    return {name: one for name, one in before["sections"].items() if one["status"] == PASSED}


def read_section(out: Path, name: str) -> dict[str, Any]:
    """Return what a section has written; empty when it wrote nothing."""
    path = out / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def ended(code: int | None, found: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return what became of a section whose process ended with `code`, None for no time left."""
    return {
        "status": _status(code, found),
        "exit_code": code,
        "seconds": round(seconds, 1),
        "failures": [failure["what"] for failure in found.get("failures", [])],
        "skipped": [skipped["what"] for skipped in found.get("skipped", [])],
    }


def _status(code: int | None, found: Mapping[str, Any]) -> str:
    if code is None:
        return "out of time"
    if code:
        return "failed"
    return PASSED if found.get("rows") else "skipped"
