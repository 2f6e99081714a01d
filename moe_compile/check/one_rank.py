"""One rank of one section, as `Ranks` starts it: its command line, its team, and how it ends.

Contract
    Rank, ranks and where they meet are in the environment, as torchrun writes it. The exit status
    is 0 when nothing failed, `RESTART` when a new process should go on. What was found is on disk
    whatever happens.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from moe_compile.check.sections import Record
from moe_compile.check.team import RESTART, OutOfStep, Team


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
