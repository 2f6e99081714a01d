"""`megamoe check`: steps of a job in several forms, and what of them is the same, and faster.

Contract
    Faults of the job are reported before a process starts.
    The exit status is 0 only when every section asked for ran and nothing in it failed.
    The same command again goes on: what passed on this machine, torch, sources and job stays.
    Each process of a torchrun job is one rank; by itself the command starts all ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moe_compile.commands.checked_job import CheckedJob, checked_job
from moe_compile.config import ENVIRONMENT_PREFIX
from moe_compile.errors import InvalidConfig
from torchtitan_integration.job_file import with_options
from torchtitan_integration.launch import allow_open_files, num_gpus, settings_on_gpus
from torchtitan_integration.layout import BACKEND

SECTIONS: Final = {"same": 1.0, "faster": 1.0, "where": 0.5, "better": 2.0, "hardware": 0.5}
"""Sections, and their shares of the time."""
GENERATING: Final = ("faster", "where", "better")
"""Sections that time generated code."""
ON_REQUEST: Final = "better"
INTERRUPTED: Final = 130
"""The exit status of a shell's command that an interrupt ended."""
BUDGET_S: Final = 3600.0
WITHOUT_GPUS: Final = {"CUDA_VISIBLE_DEVICES": ""}
"""For ranks that run on the CPU of a machine with GPUs: a program takes what it sees."""


def add_check(commands: Any) -> None:
    """Add the subcommand."""
    check = commands.add_parser(
        "check",
        help="show on this machine that a job's results stay the same, and how much faster it runs",
        description="Train a few steps of a torchtitan job, or the step that a function of your "
        "own script returns (docs/check.md), in several forms, from one start and over the same "
        "batches: as written, compiled by Inductor, compiled by megamoe, and by megamoe with one "
        "rewrite left out at a time. The section same compares losses, gradients and parameters, "
        "bit for bit or by their distance from float64. faster times steps of megamoe and of "
        "Inductor's fastest form in turn. where lists each collective's hidden and exposed time, "
        "beside the prediction. better, on request, races other options for the fastest. "
        "hardware measures the rates of the device and of links, and writes a profile. With "
        "fewer GPUs than ranks every form runs on the CPU, and times of a CPU do not predict "
        "those of a cluster.",
        epilog="Flags of torchtitan follow the file and override its keys, as for megamoe train. "
        "With --megamoe.codegen fx no code is generated: the check takes seconds instead of "
        "minutes, and runs the section same only. If torchrun starts the command, each process "
        "is one rank.",
        usage="megamoe check [-h] [--out FOLDER] [--sections LIST] [--steps N] [--rounds N] "
        "[--layers N] [--budget-s S] [--nproc N] [--again] [--write] CONFIG "
        "[--section.key value ...]",
        allow_abbrev=False,
    )
    check.add_argument(
        "config", metavar="CONFIG", help="as for megamoe train, or script.py:function"
    )
    add_job_arguments(check, folder="check")
    check.add_argument(
        "--sections",
        type=lambda text: text.split(","),
        help=f"of {','.join(SECTIONS)}; default: all but {ON_REQUEST}",
    )
    check.add_argument(
        "--write",
        action="store_true",
        help="write the options that the section better found into CONFIG, if they are faster on "
        "GPUs",
    )
    check.add_argument("--rounds", type=number, default=11, help="rounds of the section faster, "
        "each with one step of every form; default: %(default)s")  # fmt: skip
    check.add_argument("--again", action="store_true", help="also run sections that passed before")


def add_job_arguments(parser: argparse.ArgumentParser, *, folder: str) -> None:
    """Add the arguments of commands that run a job in several forms."""
    parser.add_argument("--out", type=Path, help=f"folder for the results; default: {folder} in "
                        "the job's folder")  # fmt: skip
    parser.add_argument("--steps", type=number, default=3, help="steps of each form in the section "
        "same; default: %(default)s")  # fmt: skip
    parser.add_argument("--layers", type=number, default=0, help="run only the model's first N "
        "layers")  # fmt: skip
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="time limit of all "
        "sections together, in seconds; default: %(default)g")  # fmt: skip
    parser.add_argument("--nproc", metavar="N", type=number, help="ranks to start; default: the "
        "product of the TOML's degrees; for a script 1")  # fmt: skip


def check(known: argparse.Namespace, overrides: list[str]) -> int:
    """Run the subcommand; return the exit status. Raises InvalidConfig."""
    job = checked_job(known, overrides)
    sections = _sections(job, known.sections)
    if known.write:
        _check_write(job, sections)
    words = [f"--rounds={known.rounds}"]

    def run(started: Started) -> int:
        summary: Any = importlib.import_module("moe_compile.check.summary")  # imports torch
        status = int(summary.run_check(started.team, started.out, sections, started.head, known))
        if known.write:
            _write(job, started.out, started.head["device"])
        return status

    return run_on_ranks(job, known, words, run, folder="check")


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A job's ranks, this process the driver of all or of one, and the head of its summary."""

    team: Any
    """A `moe_compile.check.ranks.Ranks`."""
    out: Path
    head: dict[str, Any]


def run_on_ranks(
    job: CheckedJob,
    known: argparse.Namespace,
    words: list[str],
    run: Callable[[Started], int],
    *,
    folder: str,
) -> int:
    """Return the exit status of `run`, or of what it orders where this is the driver of one rank.

    Each rank is given `words`. Results go to `folder` by default.
    """
    for note in job.notes:
        _say(f"note: {note}")
    allow_open_files()
    device = "cpu" if num_gpus() < _local_ranks(job.ranks) else "cuda"
    settings = settings_on_gpus(os.environ) if device == "cuda" else WITHOUT_GPUS
    out = (known.out or job.folder / folder).resolve()
    asked = [*words, f"--steps={known.steps}", f"--layers={known.layers}"]
    words = [*asked, *job.words(out)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ranks are ended on the way out
    try:
        driver: Any = importlib.import_module("moe_compile.check.ranks")
        team = driver.Ranks(out, device, job.ranks, job.module, settings=settings, words=words)
        if team.rank:
            team.follow()
            return 0
        head = {
            "job": _identity(job, asked),
            "device": device,
            "ranks": team.num_ranks,
            "layers": known.layers,
            "settings": settings,
            "unseen": job.unseen,
        }
        return run(Started(team=team, out=out, head=head))
    except KeyboardInterrupt:
        _say(f"the check was ended by a signal; the results so far are in {out}")
        return INTERRUPTED


def number(text: str) -> int:
    """Return a whole number of at least 1, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid number; write a whole number of at least 1"
        )
    return int(text)


def _say(text: str) -> None:
    """Print a line, once for all ranks."""
    if os.environ.get("RANK", "0") != "0":
        return
    print(f"megamoe: {text}", file=sys.stderr, flush=True)  # noqa: T201  (the user's terminal)


def _sections(job: CheckedJob, asked: list[str] | None) -> dict[str, float]:
    """Return the sections to run; by default all, without code generation only `same`."""
    if unknown := sorted({*(asked or ())} - SECTIONS.keys()):
        raise InvalidConfig(
            f"--sections: there is no section {unknown[0]!r}; choose from {', '.join(SECTIONS)}"
        )
    if not job.generates and (timed := [name for name in GENERATING if name in (asked or ())]):
        raise InvalidConfig(
            'megamoe.codegen is "fx": no code is generated, so times would be those of single '
            f"operators; leave {timed[0]} out of --sections, or leave megamoe.codegen out of the "
            "job"
        )
    if not asked and not job.generates:
        _say(
            'megamoe.codegen is "fx": the sections faster and where are left out, since no code '
            "is generated"
        )
    default = [name for name in SECTIONS if job.generates and name != ON_REQUEST] or ["same"]
    return {name: share for name, share in SECTIONS.items() if name in (asked or default)}


def _check_write(job: CheckedJob, sections: Mapping[str, float]) -> None:
    if ON_REQUEST not in sections:
        raise InvalidConfig(
            f"--write writes the options that section {ON_REQUEST} finds, but {ON_REQUEST} is "
            "not among the sections to run; add it to --sections, or leave --write out"
        )
    if job.not_written:
        raise InvalidConfig(f"--write would change {job.not_written}")


def _write(job: CheckedJob, out: Path, device: str) -> None:
    """Write the options that won into the job's file, once, where they are known to be faster."""
    if os.environ.get("RANK", "0") != "0":
        return
    sections: Any = importlib.import_module("moe_compile.check.sections")
    found = sections.read_section(out, ON_REQUEST)
    if device == "cpu":
        _say(
            f"{job.path} is unchanged: options were raced on CPUs, whose times do not "
            "predict those of GPUs"
        )
    elif not found.get("is_complete") or not found.get("is_faster"):
        _say(
            f"{job.path} is unchanged: no options were found that are faster than those in the file"
        )
    else:
        job.path.write_text(with_options(job.path.read_text(), BACKEND, found["won"]))
        _say(f"{job.path}: written into [{BACKEND}]: {json.dumps(found['won'])}")


def _local_ranks(ranks: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def _identity(job: CheckedJob, asked: Sequence[str]) -> str:
    """Return a hash of the job and of what was `asked` of it."""
    ours = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(ENVIRONMENT_PREFIX))
    said = [job.path.read_text(), *job.said, *ours, *asked]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()
