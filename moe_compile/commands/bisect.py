"""`megamoe bisect`: the pass, then the block, by which a job's values are wrong.

Contract
    A torchtitan job is run in forms, as by `megamoe check`; behind `--` any command is run again
    and again. The exit status is 0 where a culprit was found, else 1.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from moe_compile.commands.check import Started, add_job_arguments, run_on_ranks
from moe_compile.commands.checked_job import checked_job
from moe_compile.errors import InvalidConfig

NAME: Final = "bisect"
COMMAND: Final = "--"
FORM_S: Final = 600.0


def add_bisect(commands: Any) -> None:
    """Add the subcommand."""
    bisect = commands.add_parser(
        NAME,
        help="find the pass that makes a job's values wrong, or a command fail",
        description="Find the pass, and the block, that make values differ in megamoe check, or "
        "that keep a step from ending. Each trial runs the job without some of the passes, later "
        "with megamoe in some of the blocks only, and halves what is left to search. Or run a "
        "COMMAND again and again without some of the passes: a run is good if it ends with "
        "status 0 within its time.",
        epilog="Flags of torchtitan follow the file and override its keys. With --megamoe.codegen "
        "fx no code is generated: this is fast, and finds all faults except those of generated "
        "code.",
        usage="megamoe bisect [-h] [--out FOLDER] [--steps N] [--layers N] [--form-s S] "
        "[--slow] [--budget-s S] [--nproc N] CONFIG [--section.key value ...]\n"
        "       megamoe bisect [--out FOLDER] [--form-s S] -- COMMAND ...",
        allow_abbrev=False,
    )
    bisect.add_argument("config", metavar="CONFIG", nargs="?", help="as for megamoe check")
    add_job_arguments(bisect, folder=NAME)
    bisect.add_argument(
        "--slow",
        action="store_true",
        help="find the pass that makes steps slower than Inductor's: time steps of both in turn",
    )
    bisect.add_argument(
        "--form-s",
        type=float,
        default=FORM_S,
        help="time limit of one trial of the job or of COMMAND, in seconds; a longer trial counts "
        "as wrong; default: %(default)g",
    )


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command line up to `--`, and the command behind it; [] without one."""
    words = list(arguments)
    if words[:1] != [NAME] or COMMAND not in words:
        return words, []
    place = words.index(COMMAND)
    return words[:place], words[place + 1 :]


def bisect(known: argparse.Namespace, overrides: list[str], command: list[str]) -> int:
    """Run the subcommand; return the exit status. Raises InvalidConfig."""
    if bool(known.config) == bool(command):
        raise InvalidConfig(
            "bisect: write either the path of a job's TOML file, or `--` and the command to run"
        )
    if command:
        if known.slow:
            raise InvalidConfig(
                "bisect --slow works for torchtitan jobs only: of another command bisect cannot "
                "measure the time of a step; leave out --slow"
            )
        if overrides:
            raise InvalidConfig(
                f"bisect: {overrides[0]!r} is a flag of torchtitan, which a command does not "
                "take; write it after --, as part of the command"
            )
        out = (known.out or Path(NAME)).resolve()
        run: Any = importlib.import_module("moe_compile.check.bisection")  # imports torch
        return int(run.bisect_command(command, out, known.form_s))
    job = checked_job(known, overrides)
    if known.slow and not job.generates:
        raise InvalidConfig(
            'bisect --slow: megamoe.codegen is "fx", which generates no code to be timed; leave '
            "one of the two out"
        )

    def search(started: Started) -> int:
        run: Any = importlib.import_module("moe_compile.check.bisection")
        return int(run.bisect_job(started.team, started.out, started.head, known.budget_s))

    words = [f"--form-s={known.form_s}", *(["--slow"] if known.slow else [])]
    return run_on_ranks(job, known, words, search, folder=NAME)
