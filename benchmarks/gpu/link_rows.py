"""What rounds over the emulated link come to: a row per setting and variant, and warnings.

Contract
    Ratios are medians of ratios within rounds, with their intervals; the best of Inductor's
    settings is the one with the least median at that setting of the link.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.link.cases import BASELINE, NO_LINK_RATIO
from benchmarks.link.results import LEAST_CONTROL
from moe_compile.check.paired import ratio

AGAIN: Final = "inductor again"
"""The baseline a second time in every round: how far from 1 equal things come out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One timed step."""

    seconds: float
    host_s: float
    """Until the host had launched all of it."""
    link_s: float
    """The lane was carrying."""
    num_bytes: int
    num_exchanges: int


def rows_of(
    setting: str, steps: Mapping[str, list[Step]], compute_ms: float
) -> list[dict[str, Any]]:
    """Return a row per variant: times, and ratios within rounds to Inductor and to its best.

    `over_bound` is the time over max(compute, what this variant sends), the best of any overlap.
    """
    seconds = {name: [s.seconds for s in made] for name, made in steps.items()}
    theirs = [name for name in steps if not name.startswith("megamoe") and name != AGAIN]
    best = min(theirs, key=lambda name: statistics.median(seconds[name]))
    rows = []
    for name, made in steps.items():
        ms = 1e3 * statistics.median(seconds[name])
        link_ms = 1e3 * statistics.median(s.link_s for s in made)
        row = {
            "setting": setting,
            "variant": name,
            "ms": ms,
            "ms_quartiles": [1e3 * q for q in statistics.quantiles(seconds[name], n=4)],
            "link_ms": link_ms,
            "host_ms": 1e3 * statistics.median(s.host_s for s in made),
            "over_bound": ms / max(compute_ms, link_ms),
            "bytes": made[-1].num_bytes,
            "exchanges": made[-1].num_exchanges,
            "vs_inductor": asdict(ratio(seconds[name], seconds[BASELINE])),
            "best_inductor": best,
            "vs_best_inductor": asdict(ratio(seconds[name], seconds[best])),
        }
        rows.append(row)
    return rows


def warnings_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return what a reader must know before believing the ratios."""
    return [
        f"{row['variant']}: {row['vs_inductor']['median']:.2f} of {BASELINE} on the control lane; "
        "part of its gain elsewhere is compute saved or noise, not overlap"
        for row in rows
        if row["setting"] == NO_LINK_RATIO and row["vs_inductor"]["median"] < LEAST_CONTROL
    ]
