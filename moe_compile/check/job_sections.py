"""The sections of a program that trains, and one rank of one of them, as `Ranks` starts it.

Contract
    The ranks of the program meet in a store of their own, which the first rank has: a section's
    ranks are new, and find no keys of others there. torchrun's variables lead to it.
    A rank has its command line and its team. Rank, ranks and where they meet are in the
    environment, as torchrun writes it. The exit status is 0 when nothing failed, `RESTART` when a
    new process should go on. What was found is on disk whatever happens.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn

import torch.distributed as dist

from moe_compile.check.better import check_better
from moe_compile.check.culprit import check_and_search, check_culprit
from moe_compile.check.faster import check_faster
from moe_compile.check.forms import keep_many_programs
from moe_compile.check.hardware import check_hardware
from moe_compile.check.parent import end_with_parent
from moe_compile.check.ranks import OF_AGENT
from moe_compile.check.same import Trials
from moe_compile.check.sections import Record
from moe_compile.check.slower import check_slow
from moe_compile.check.team import RESTART, OutOfStep, Team
from moe_compile.check.where import check_where
from moe_compile.testing.rank_pool import meeting_point

SECTIONS: Final[Mapping[str, Callable[[Team, Any, argparse.Namespace], None]]] = {
    "same": lambda team, job, asked: check_and_search(Trials(team, job, job.config, asked.steps)),
    "faster": lambda team, job, asked: check_faster(team, job, job.config, asked.rounds),
    "where": lambda team, job, asked: check_where(team, job, job.config, asked.out),
    "better": lambda team, job, _: check_better(team, job, job.config),
    "hardware": lambda team, job, _: check_hardware(team, job.config),
    "culprit": lambda team, job, asked: _culprit(
        Trials(team, job, job.config, asked.steps, asked.form_s), asked
    ),
}


def read_rank_arguments(
    sections: Iterable[str], devices: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Return the command line that `Ranks` gives to a rank, and the words that are not its own."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("section", choices=[*sections])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=devices, required=True)
    parser.add_argument("--budget-s", type=float, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    return parser.parse_known_args()


def team_of(
    arguments: argparse.Namespace, collective_timeout_s: float, *, makes_groups: bool = True
) -> Team:
    """Return this rank's team; that of rank 0 keeps the section's record."""
    rank, record = int(os.environ["RANK"]), None
    if rank == 0:
        record = Record(
            path=arguments.out / f"{arguments.section}.json",
            deadline=time.monotonic() + arguments.budget_s,
            resumes=arguments.attempt > 0,
        )
    return Team(
        meeting(f"{arguments.section}/{arguments.attempt}", collective_timeout_s),
        rank,
        int(os.environ["WORLD_SIZE"]),
        device=arguments.device,
        local_rank=int(os.environ["LOCAL_RANK"]),
        collective_timeout_s=collective_timeout_s,
        record=record,
        makes_groups=makes_groups,
    )


def run_section(team: Team, work: Callable[[], None]) -> int:
    """Run one section on this rank; return the exit status."""
    began = time.monotonic()
    try:
        work()
    except OutOfStep:
        return RESTART
    if team.record is None:
        return 0
    before_s = team.record.data.get("seconds", 0.0)
    team.record.put(seconds=round(before_s + time.monotonic() - began, 1), is_complete=True)
    return 1 if team.record.data["failures"] else 0


def meeting(name: str, timeout_s: float) -> dist.Store:
    """Return where the ranks meet that do `name`; its owner is no rank, and outlives them."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    return dist.PrefixStore(name, store)


def _culprit(trials: Trials, asked: argparse.Namespace) -> None:
    if asked.slow:
        check_slow(trials, asked.rounds)
    else:
        check_culprit(trials)


def add_numbers(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that the command hands on to each rank."""
    parser.add_argument(
        "--steps", type=int, default=3, help="steps of each form in the section same"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=11,
        help="rounds of the section faster, each with one step of every form",
    )
    parser.add_argument(
        "--slow", action="store_true", help="search by the times of steps, not by their results"
    )
    parser.add_argument(
        "--form-s", type=float, default=0.0, help="time limit of a form in seconds; 0: no limit"
    )
    parser.add_argument(
        "--layers", type=int, default=0, help="run only the model's first N layers; 0: all"
    )


def run_rank(what: str, make: Callable[[list[str], argparse.Namespace], Any]) -> int:
    """Be one rank of the section named on the command line; return the exit status.

    `make` returns the program, a `Steps` with its options as `config`, by the words left on the
    command line and the arguments; `what` names it where it cannot be made.
    """
    end_with_parent()
    arguments, words = read_rank_arguments(SECTIONS, ["cpu", "cuda"])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_numbers(parser)
    asked, words = parser.parse_known_args(words, arguments)
    team = team_of(arguments, arguments.budget_s, makes_groups=False)
    keep_many_programs()
    store = meeting_point() if team.is_first else None
    port = team.tell("trainer", None if store is None else str(store.port))
    os.environ.update({"MASTER_PORT": port, OF_AGENT: str(True)})
    try:
        job = make(words, asked)
    except Exception as error:  # noqa: BLE001  (a program fails in ways no list covers)
        traceback.print_exc()
        if team.record is not None:
            team.record.fail(what, f"{type(error).__name__}: {error}"[:500])
            team.record.put(is_complete=True)
        return 1
    return run_section(team, lambda: SECTIONS[arguments.section](team, job, asked))


def leave(status: int) -> NoReturn:
    """End this process: groups would wait for ranks that have left."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
