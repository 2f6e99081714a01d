"""Section `links`: what collectives of each message size take, and what that says of the link.

Contract
    A rate is of what leaves a rank, by the slowest rank, in medians. Of a link there are told the
    time of the least message and the rates of the greatest. Ranks of a node are measured apart from
    all where there are several nodes.
"""

from __future__ import annotations

import math
import statistics
from functools import partial
from typing import Any, Final

from benchmarks.node.collectives import (
    EXCHANGE,
    GATHER,
    NAMES,
    launcher,
    leaving_bytes,
    seconds_alone,
)
from benchmarks.node.sizes import Sizes
from moe_compile.check.sections import Record, say
from moe_compile.check.team import Team

NEEDS_S: Final = 20.0
"""What one collective takes at all sizes."""


def check_links(team: Team, sizes: Sizes, node_ranks: int) -> None:
    """Run the section; `node_ranks` is how many ranks share a machine."""
    for num_ranks in sorted({node_ranks, team.num_ranks}):
        for name in NAMES:
            team.run(
                f"{name}, {num_ranks} ranks",
                partial(_times, name, sizes),
                partial(judge_times, name, num_ranks, sizes.message_bytes),
                num_ranks=num_ranks,
                needs_s=NEEDS_S,
            )


def _times(name: str, sizes: Sizes) -> list[list[float]]:
    """Return the seconds of each size, of several runs."""
    return [seconds_alone(launcher(name, n), sizes.repeats) for n in sizes.message_bytes]


def judge_times(
    name: str,
    num_ranks: int,
    message_bytes: tuple[int, ...],
    record: Record,
    found: list[list[list[float]]],
) -> None:
    """Record a row for each size; what took no time, or no number, fails."""
    rates = []
    for place, num_bytes in enumerate(message_bytes):
        seconds = max(statistics.median(times[place]) for times in found)  # of groups side by side
        is_time = math.isfinite(seconds) and seconds > 0.0
        why = f"{num_bytes} bytes took {seconds} s"
        if not record.expect(is_time, f"{name}, {num_ranks} ranks", why):
            return
        rates.append(leaving_bytes(num_bytes, num_ranks) / seconds / 1e9)
        record.add_row(
            {
                "collective": name,
                "ranks": num_ranks,
                "bytes": num_bytes,
                "us": 1e6 * seconds,
                "gb_per_s": rates[-1],
            }
        )
    say(f"links: {name}, {num_ranks} ranks: up to {max(rates):.3g} GB/s")


def link_of(rows: list[dict[str, Any]], num_ranks: int) -> dict[str, float]:
    """Return what a section's rows say of the link among so many ranks.

    Raises LookupError where a collective was not measured.
    """

    def of(name: str) -> list[dict[str, Any]]:
        chosen = [r for r in rows if (r["collective"], r["ranks"]) == (name, num_ranks)]
        if not chosen:
            raise LookupError(f"{name} among {num_ranks} ranks")
        return sorted(chosen, key=lambda row: row["bytes"])

    exchange, gather = of(EXCHANGE), of(GATHER)
    return {
        "latency_us": exchange[0]["us"],
        "gb_per_s": exchange[-1]["gb_per_s"],
        "gather_gb_per_s": gather[-1]["gb_per_s"],
    }
