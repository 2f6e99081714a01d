"""Run the sections one after the other, each in its time; the package's docstring has the rest."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.gpu.gpu_machine import describe_gpu_machine
from benchmarks.gpu.limited_process import run_limited
from benchmarks.gpu.record import say, write_json
from benchmarks.gpu.sizes import PROMISED_S, SIZES
from benchmarks.gpu.summary import print_summary, read_section
from moe_compile.report.command import recorded_command

WIDTH: Final = 150
ENVIRONMENT: Final = {"GLOO_SOCKET_IFNAME": "lo"}
"""Where nothing else is set: a machine without a network has no other interface."""
GRACE_S: Final = 8.0
"""Before its end a section begins nothing more; then it is killed."""
RESERVE_S: Final = 10.0
"""For starting and for the table."""


def main() -> int:
    """Run the sections asked for; returns 1 when one failed."""
    arguments = _arguments()
    began = time.monotonic()
    out = arguments.out.resolve()
    for name in arguments.sections:
        (out / f"{name}.json").unlink(missing_ok=True)
    console = Console(width=WIDTH)
    summary: dict[str, Any] = {
        "command": recorded_command("benchmarks.gpu", sys.argv[1:]),
        "device": arguments.device,
        "machine": describe_gpu_machine(arguments.device),
        "sections": {},
    }
    for key, value in summary["machine"].items():
        console.print(f"{key}: {value}", highlight=False)
    names = [name for name in PROMISED_S if name in arguments.sections]
    promised = sum(PROMISED_S[name] for name in names)
    for name in names:
        left_s = arguments.budget_s - RESERVE_S - (time.monotonic() - began)
        budget_s = left_s * PROMISED_S[name] / promised
        promised -= PROMISED_S[name]
        summary["sections"][name] = _run(name, arguments.device, out, budget_s)
        summary["seconds"] = round(time.monotonic() - began, 1)
        write_json(out / "summary.json", summary)
    print_summary(console, out, summary)
    return 0 if all(s["status"] == "passed" for s in summary["sections"].values()) else 1


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
    return "passed" if found.get("rows") else "skipped"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--budget-s", type=float, default=540.0, help="default: %(default)s")
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
