"""Run the sections one after the other, each in its time; the package's docstring has the rest."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from benchmarks.node.beside import of_own_budget
from benchmarks.node.sizes import PROMISED_S, SIZES
from benchmarks.node.summary import print_summary
from moe_compile.check.hardware import describe_gpu_machine, write_profile
from moe_compile.check.ranks import Ranks
from moe_compile.check.sections import passed_before, read_arguments, read_section, run_sections
from moe_compile.hardware.detect import NO_GPU, detected_profile
from moe_compile.report.provenance import recorded_command
from moe_compile.source_hash import EVERY_SOURCE, hash_of_sources
from torchtitan_integration.launch import settings_on_gpus

WIDTH: Final = 150
LEAST_RANKS: Final = 2
RANK: Final = "benchmarks.node.one_rank"


def main() -> int:
    """Run the sections asked for; returns 1 when one failed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ranks are ended on the way out
    arguments = _arguments()
    out = arguments.out.resolve()
    settings = settings_on_gpus(os.environ) if arguments.device == "cuda" else {}
    ranks = Ranks(out, arguments.device, arguments.ranks, RANK, settings=settings)
    if ranks.rank:
        ranks.follow()
        return 0
    console = Console(width=WIDTH)
    summary: dict[str, Any] = {
        "command": recorded_command("benchmarks.node", sys.argv[1:]),
        "device": arguments.device,
        "ranks": ranks.num_ranks,
        "machine": describe_gpu_machine(arguments.device),
        "sources": hash_of_sources(EVERY_SOURCE),
        "sections": {},
    }
    if not arguments.again:
        summary["sections"] = passed_before(out, summary, ("device", "ranks", "sources"))
    summary["settings"] = settings
    for key, value in {**summary["machine"], **settings}.items():
        console.print(f"{key}: {value}", highlight=False)
    for name in summary["sections"]:
        console.print(
            f"{name}: it passed in an earlier run, whose results are kept (--again runs it again)"
        )
    promised = {name: s for name, s in PROMISED_S.items() if name in arguments.sections}
    has_passed = run_sections(out, summary, promised, arguments.budget_s, ranks.run)
    ranks.end()
    print_summary(console, out, summary)
    if {"links", "beside"} <= {*summary["sections"]}:
        console.print(_profile(arguments.device, out, summary["machine"]), markup=False)
    return 0 if has_passed else 1


def _profile(device: str, out: Path, machine: Mapping[str, Any]) -> str:
    """Write the profile that was measured; return what to say of it."""
    sections = {name: read_section(out, name) for name in ("links", "beside")}
    start = detected_profile() if device == "cuda" else NO_GPU
    try:
        rows, beside = sections["links"].get("rows", []), of_own_budget(sections["beside"])
        if not rows:
            raise LookupError("section links")
        path = write_profile(out, start, machine, rows, beside=beside)
    except LookupError as error:
        return f"no profile is written: {error.args[0]} has no result"
    return f"{path}: links as measured; megamoe calibrate OUT --start {path} adds this device"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.node", description=__doc__)
    parser.add_argument(
        "--ranks", type=int, default=0, help="without torchrun; default: the GPUs, or 2 processors"
    )
    budget_s = sum(PROMISED_S.values()) + 60.0
    arguments = read_arguments(parser, PROMISED_S, sorted(SIZES), budget_s=budget_s)
    num_devices = torch.cuda.device_count() if arguments.device == "cuda" else LEAST_RANKS
    arguments.ranks = arguments.ranks or num_devices
    if arguments.device == "cuda" and arguments.ranks > num_devices:
        parser.error(f"--ranks {arguments.ranks}: torch sees {num_devices} CUDA devices")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
