"""`python -m benchmarks.node.one_rank SECTION ...`: one rank of one section.

Contract
    Rank, ranks and where they meet are in the environment, as torchrun writes it. The exit status
    is 0 when nothing failed, `RESTART` when a new process should go on. What was found is on disk
    whatever happens.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch.distributed as dist

from benchmarks.node.beside import check_beside
from benchmarks.node.hidden import check_hidden
from benchmarks.node.links import check_links
from benchmarks.node.recipes import check_recipes
from benchmarks.node.sizes import SIZES, Sizes
from moe_compile.check.bits import check_bits
from moe_compile.check.sections import Record
from moe_compile.check.team import RESTART, OutOfStep, Team

SECTIONS: Final[Mapping[str, Callable[[Team, Sizes, Path], None]]] = {
    "beside": lambda team, sizes, _: check_beside(team, sizes),
    "links": lambda team, sizes, _: check_links(team, sizes, node_ranks(team.num_ranks)),
    "hidden": check_hidden,
    "bits": lambda team, sizes, _: check_bits(team, sizes.programs),
    "recipes": check_recipes,
}


def node_ranks(num_ranks: int) -> int:
    """Return how many ranks share a machine: torchrun says so, by itself all do."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))


def main() -> int:
    """Be one rank of the section named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=sorted(SIZES), required=True)
    parser.add_argument("--budget-s", type=float, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    arguments = parser.parse_args()
    began, rank = time.monotonic(), int(os.environ["RANK"])
    record = None
    if rank == 0:
        record = Record(
            path=arguments.out / f"{arguments.section}.json",
            deadline=began + arguments.budget_s,
            resumes=arguments.attempt > 0,
        )
    sizes = SIZES[arguments.device]
    team = Team(
        meeting(f"{arguments.section}/{arguments.attempt}", sizes.collective_timeout_s),
        rank,
        int(os.environ["WORLD_SIZE"]),
        device=arguments.device,
        local_rank=int(os.environ["LOCAL_RANK"]),
        collective_timeout_s=sizes.collective_timeout_s,
        record=record,
    )
    return run_section(arguments.section, team, sizes, arguments.out)


def run_section(name: str, team: Team, sizes: Sizes, out: Path) -> int:
    """Run one section on this rank; return the exit status."""
    began = time.monotonic()
    try:
        SECTIONS[name](team, sizes, out)
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


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a group that is out of step would be waited for
