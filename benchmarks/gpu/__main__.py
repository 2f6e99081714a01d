"""Run the sections one after the other, each in its time; the package's docstring has the rest."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.gpu.gpu_machine import describe_gpu_machine
from benchmarks.gpu.limited_process import run_limited
from benchmarks.gpu.record import say, write_json
from benchmarks.gpu.sizes import LONGEST_S, PROMISED_S, SIZES
from benchmarks.gpu.summary import print_summary, read_section
from moe_compile.report.command import recorded_command
from moe_compile.source_hash import hash_of_sources

WIDTH: Final = 150
ENVIRONMENT: Final = {"GLOO_SOCKET_IFNAME": "lo"}
"""Where nothing else is set: a machine without a network has no other interface."""
PASSED: Final = "passed"
ALIKE: Final = ("gpu", "torch", "cuda", "triton")
"""Of a machine: where one of these is another, what passed before says nothing."""
GRACE_S: Final = 8.0
"""Before its end a section begins nothing more; then it is killed."""
RESERVE_S: Final = 10.0
"""For starting and for the table."""


def main() -> int:
    """Run the sections asked for; returns 1 when one failed."""
    arguments = _arguments()
    began = time.monotonic()
    out = arguments.out.resolve()
    console = Console(width=WIDTH)
    summary: dict[str, Any] = {
        "command": recorded_command("benchmarks.gpu", sys.argv[1:]),
        "device": arguments.device,
        "machine": describe_gpu_machine(arguments.device),
        "sources": hash_of_sources(),
        "sections": {},
    }
    if not arguments.again:
        summary["sections"] = _passed_before(out, summary)
    for key, value in summary["machine"].items():
        console.print(f"{key}: {value}", highlight=False)
    for name in summary["sections"]:
        console.print(f"{name}: passed before, its results stay (--again runs it)")
    asked = [name for name in PROMISED_S if name in arguments.sections]
    names = [name for name in asked if name not in summary["sections"]]
    for name in names:
        (out / f"{name}.json").unlink(missing_ok=True)
    promised = sum(PROMISED_S[name] for name in names)
    for name in names:
        left_s = arguments.budget_s - RESERVE_S - (time.monotonic() - began)
        budget_s = min(LONGEST_S, left_s * PROMISED_S[name] / promised)
        promised -= PROMISED_S[name]
        summary["sections"][name] = _run(name, arguments.device, out, budget_s)
        summary["seconds"] = round(time.monotonic() - began, 1)
        write_json(out / "summary.json", summary)
    print_summary(console, out, summary)
    return 0 if all(s["status"] == PASSED for s in summary["sections"].values()) else 1


def _passed_before(out: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of an earlier run that passed, on this GPU, torch and code."""
    path = out / "summary.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    alike = ("device", "sources")
    if any(before.get(key) != summary[key] for key in alike) or any(
        before.get("machine", {}).get(key) != summary["machine"].get(key) for key in ALIKE
    ):
        return {}
    return {name: one for name, one in before["sections"].items() if one["status"] == PASSED}


def _run(name: str, device: str, out: Path, budget_s: float) -> dict[str, Any]:
    """Run one section; what it prints to stderr goes to its log."""
    if budget_s <= GRACE_S:
        return {"status": "skipped", "why": "out of time"}
    say(f"{name}: {budget_s:.0f} s at most")
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu.one_section", name, f"--out={out}"]
    command += [f"--device={device}", f"--budget-s={budget_s - GRACE_S}"]
    code = run_limited(command, out / f"{name}.log", budget_s, {**ENVIRONMENT, **os.environ})
    found = read_section(out, name)
    return {
        "status": _status(code, found),
        "exit_code": code,
        "seconds": round(time.monotonic() - began, 1),
        "failures": [failure["what"] for failure in found.get("failures", [])],
        "skipped": [skipped["what"] for skipped in found.get("skipped", [])],
    }


def _status(code: int | None, found: dict[str, Any]) -> str:
    if code is None:
        return "out of time"
    if code:
        return "failed"
    return PASSED if found.get("rows") else "skipped"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--budget-s", type=float, default=1500.0, help="default: %(default)s")
    parser.add_argument(
        "--again", action="store_true", help="run sections too that FOLDER has passed results of"
    )
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda")
    parser.add_argument(
        "--sections",
        type=lambda text: text.split(","),
        default=list(PROMISED_S),
        help="of " + ",".join(PROMISED_S),
    )
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.sections) - set(PROMISED_S)):
        parser.error(f"no section {', '.join(unknown)}; known: {', '.join(PROMISED_S)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
