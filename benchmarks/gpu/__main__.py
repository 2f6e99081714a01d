"""Run the sections one after the other, each in its time; the package's docstring has the rest."""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.gpu.sizes import PROMISED_S, SIZES
from benchmarks.gpu.summary import print_summary
from moe_compile.check.hardware import describe_gpu_machine
from moe_compile.check.limited_process import run_limited
from moe_compile.check.sections import (
    GRACE_S,
    ended,
    passed_before,
    read_arguments,
    read_section,
    run_sections,
    say,
)
from moe_compile.report.provenance import recorded_command
from moe_compile.source_hash import EVERY_SOURCE, hash_of_sources

WIDTH: Final = 150
ENVIRONMENT: Final = {"GLOO_SOCKET_IFNAME": "lo"}
"""Where nothing else is set: a machine without a network has no other interface."""


def main() -> int:
    """Run the sections asked for; returns 1 when one failed."""
    arguments = _arguments()
    out = arguments.out.resolve()
    console = Console(width=WIDTH)
    summary: dict[str, Any] = {
        "command": recorded_command("benchmarks.gpu", sys.argv[1:]),
        "device": arguments.device,
        "machine": describe_gpu_machine(arguments.device),
        "sources": hash_of_sources(EVERY_SOURCE),
        "sections": {},
    }
    if not arguments.again:
        summary["sections"] = passed_before(out, summary)
    for key, value in summary["machine"].items():
        console.print(f"{key}: {value}", highlight=False)
    for name in summary["sections"]:
        console.print(
            f"{name}: it passed in an earlier run, whose results are kept (--again runs it again)"
        )
    promised = {name: s for name, s in PROMISED_S.items() if name in arguments.sections}
    run = partial(_run, arguments.device, out)
    has_passed = run_sections(out, summary, promised, arguments.budget_s, run)
    print_summary(console, out, summary)
    return 0 if has_passed else 1


def _run(device: str, out: Path, name: str, budget_s: float) -> dict[str, Any]:
    """Run one section; what it prints to stderr goes to its log."""
    say(f"{name}: {budget_s:.0f} s at most")
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu.one_section", name, f"--out={out}"]
    command += [f"--device={device}", f"--budget-s={budget_s - GRACE_S}"]
    code = run_limited(command, out / f"{name}.log", budget_s, {**ENVIRONMENT, **os.environ})
    return ended(code, read_section(out, name), time.monotonic() - began)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    return read_arguments(parser, PROMISED_S, sorted(SIZES), budget_s=1500.0)


if __name__ == "__main__":
    sys.exit(main())
