"""`python -m benchmarks.node.one_rank SECTION ...`: one rank of one section.

Contract
    Rank, ranks and where they meet are in the environment, as torchrun writes it. The exit status
    is 0 when nothing failed, `RESTART` when a new process should go on. What was found is on disk
    whatever happens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from benchmarks.node.beside import check_beside
from benchmarks.node.bits import check_bits
from benchmarks.node.hidden import check_hidden
from benchmarks.node.recipes import check_recipes
from benchmarks.node.sizes import SIZES, Sizes
from moe_compile.check.job_sections import read_rank_arguments, run_section, team_of
from moe_compile.check.links import check_links, node_ranks
from moe_compile.check.team import Team

SECTIONS: Final[Mapping[str, Callable[[Team, Sizes, Path], None]]] = {
    "beside": lambda team, sizes, _: check_beside(team, sizes),
    "links": lambda team, sizes, _: check_links(
        team, sizes.message_bytes, sizes.repeats, node_ranks(team.num_ranks)
    ),
    "hidden": check_hidden,
    "bits": lambda team, sizes, _: check_bits(team, sizes.programs),
    "recipes": check_recipes,
}


def main() -> int:
    """Be one rank of the section named on the command line."""
    arguments, _ = read_rank_arguments(SECTIONS, sorted(SIZES))
    sizes = SIZES[arguments.device]
    team = team_of(arguments, sizes.collective_timeout_s)
    return run_section(team, lambda: SECTIONS[arguments.section](team, sizes, arguments.out))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a group that is out of step would be waited for
