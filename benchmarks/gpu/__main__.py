"""Run the sections one after the other, each in its time; the package's docstring has the rest."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.gpu.gpu_machine import describe_gpu_machine
from benchmarks.gpu.record import say, write_json
from benchmarks.gpu.sizes import PROMISED_S, SIZES
from benchmarks.gpu.summary import print_summary, read_section

WIDTH: Final = 150
ENVIRONMENT: Final = {"GLOO_SOCKET_IFNAME": "lo"}
"""Where nothing else is set: a machine without a network has no other interface."""
GRACE_S: Final = 8.0
"""A section may take longer than its time by, before it is killed: work begun in time may end."""
RESERVE_S: Final = 10.0
"""For starting and for the table."""


def main() -> int:
    """Run the sections asked for; returns 1 when one failed."""
    arguments = _arguments()
    began = time.monotonic()
    out = arguments.out.resolve()
    console = Console(width=WIDTH)
    summary: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
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
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, stderr=log, env={**ENVIRONMENT, **os.environ}, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=budget_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_session(process)  # compile workers too
    return {
        "status": "passed" if code == 0 else "out of time" if code is None else "failed",
        "exit_code": code,
        "seconds": round(time.monotonic() - began, 1),
        "failures": [failure["what"] for failure in read_section(out, name).get("failures", [])],
    }


def _kill_session(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
