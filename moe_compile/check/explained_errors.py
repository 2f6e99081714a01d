"""Collectives as all ranks saw them, beside what was predicted, and why the two differ.

Contract
    A collective is told as the rank with most exposed time of it saw it, in the run in which that
    time is the median.
    Its transfer is the least time that a rank of its group took: a collective begins on each rank
    as that rank comes to it, and the last to come waits for nobody. No clocks are compared.
    A link's latency and bandwidth are those that fit the transfers of its collectives best, where
    they have different sizes; where they do not, the larger part of what was predicted is what is
    changed.
    What explains an error of exposed time is the term that is largest, of its sign:
        ranks come at different times       its time less its transfer
        the link's latency, its bandwidth   the same part of its time, as fitted less as predicted
        the rate of compute                 of less compute beside it, if compute takes less time
        the host's launches                 how long the host, or a thread, was late
    Times are microseconds.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from moe_compile.check.matched_collectives import Key, Planned, Seen, Window, plain

LATENCY: Final = "latency of the link"
BANDWIDTH: Final = "bandwidth of the link"
COMPUTE: Final = "rate of compute"
LAUNCH: Final = "launch by the host"
PEERS: Final = "ranks come at different times"
NONE: Final = "no constant: other compute runs beside it"
AS_PREDICTED: Final = "as predicted"
NOT_PREDICTED: Final = "nothing was predicted"
SHARE: Final = 0.1
"""Share of a collective's time up to which an error needs no reason."""
LEAST_US: Final = 20.0
"""Error that needs none either: it is of the order of what the profiler itself takes."""
APART: Final = 2.0
"""Ratio of the largest to the smallest collective from which on a latency can be told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A link as measured, over a link as the profile has it."""

    latency_us: float
    """Measured."""
    planned_latency_us: float
    slowness: float
    """Time of a byte, measured over planned."""
    planned_gb_per_s: float
    is_separated: bool
    """Whether collectives had different enough sizes to tell latency from bandwidth."""

    @property
    def gb_per_s(self) -> float | None:
        """Return the measured rate; None where bytes took no time that could be told."""
        return self.planned_gb_per_s / self.slowness if self.slowness > 0 else None


def transfers_of(windows: Sequence[Window]) -> dict[tuple[str, int], float]:
    """Return the transfer of each collective that ran: its group and its number there."""
    found: dict[tuple[str, int], float] = {}
    for one in itertools.chain.from_iterable(w.seen.values() for w in windows):
        for seen in one:
            key = (seen.group, seen.number)
            found[key] = min(found.get(key, seen.total_us), seen.total_us)
    return found


def fits_of(windows: Sequence[Window]) -> dict[str, Fit]:
    """Return what was measured of each link, by its name."""
    transfers = transfers_of(windows)
    points: dict[str, dict[Key, tuple[Planned, float]]] = {}
    for window in windows:
        for key, seen in window.seen.items():
            planned = window.planned[key]
            if planned.total_us is not None:
                took = statistics.median(transfers[one.group, one.number] for one in seen)
                points.setdefault(planned.link, {}).setdefault(key, (planned, took))
    return {link: _fit([*found.values()]) for link, found in sorted(points.items())}


def _fit(points: Sequence[tuple[Planned, float]]) -> Fit:
    """Fit a latency and a factor of the time of bytes: by medians, so that one delay is nothing."""
    planned_us = statistics.median(p.latency_us for p, _ in points)
    sized = [((p.total_us or 0.0) - p.latency_us, took) for p, took in points]
    totals = [p.total_us or 0.0 for p, _ in points]
    if is_separated := max(totals) >= APART * max(min(totals), 1e-9):
        slopes = [
            (b - a) / (y - x)
            for (x, a), (y, b) in itertools.combinations(sorted(sized), 2)
            if y >= APART * max(x, planned_us, 1e-9)
        ]
        slowness = max(0.0, statistics.median(slopes)) if slopes else 1.0
        latency = max(0.0, statistics.median(took - slowness * x for x, took in sized))
    else:
        x, took = (statistics.median(values) for values in zip(*sized, strict=True))
        if x >= planned_us:
            latency, slowness = min(planned_us, took), max(0.0, took - planned_us) / max(x, 1e-9)
        else:
            latency, slowness = max(0.0, took - x), 1.0
    return Fit(
        latency_us=latency,
        planned_latency_us=planned_us,
        slowness=slowness,
        planned_gb_per_s=points[0][0].gb_per_s,
        is_separated=is_separated,
    )


def compute_of(windows: Iterable[Window]) -> dict[str, float]:
    """Return each graph's compute beside and between its collectives, measured over predicted."""
    sums: dict[str, tuple[float, float]] = {}
    for window in windows:
        for graph, (measured, planned) in window.compute_us.items():
            before = sums.get(graph, (0.0, 0.0))
            sums[graph] = (before[0] + measured, before[1] + planned)
    return {graph: m / p for graph, (m, p) in sums.items() if p > 0}


def rows_of(windows: Sequence[Window]) -> Iterator[dict[str, Any]]:
    """Yield a row for each collective, in the order of graphs and of launches."""
    transfers, fits, compute = transfers_of(windows), fits_of(windows), compute_of(windows)
    keys: dict[Key, None] = dict.fromkeys(key for w in windows for key in w.seen)
    for key in keys:
        ranks = {rank: w.seen[key] for rank, w in enumerate(windows) if key in w.seen}
        typical = {rank: _typical(seen) for rank, seen in ranks.items()}
        rank = max(typical, key=lambda r: typical[r].exposed_us)
        measured = _measured(typical[rank], transfers)
        planned = windows[rank].planned[key]
        yield {
            "graph": key[0],
            "number": key[1],
            "collective": plain(planned.operator),
            "where": planned.where,
            "link": planned.link,
            "runs": len(ranks[rank]),
            "rank": rank,
            "measured": measured,
            **_beside_the_plan(planned, measured, fits.get(planned.link), compute.get(key[0])),
        }


def _typical(seen: Sequence[Seen]) -> Seen:
    """Return the run of median exposed time, the lesser of two."""
    return sorted(seen, key=lambda one: one.exposed_us)[(len(seen) - 1) // 2]


def _measured(one: Seen, transfers: Mapping[tuple[str, int], float]) -> dict[str, float]:
    return {
        "total_us": one.total_us,
        "hidden_us": one.hidden_us,
        "exposed_us": one.exposed_us,
        "late_us": one.late_us,
        "transfer_us": transfers[one.group, one.number],
    }


def _beside_the_plan(
    planned: Planned, measured: Mapping[str, float], fit: Fit | None, compute: float | None
) -> dict[str, Any]:
    if planned.total_us is None or fit is None:
        return {"predicted": None, "error_us": None, "terms": {}, "because": NOT_PREDICTED}
    exposed_us = planned.total_us - planned.hidden_us
    bytes_us = planned.total_us - planned.latency_us
    terms = {
        LATENCY: fit.latency_us - planned.latency_us,
        BANDWIDTH: bytes_us * (fit.slowness - 1.0),
        COMPUTE: planned.hidden_us * (1.0 - min(compute or 1.0, planned.total_us / max(
            planned.hidden_us, 1e-9))),
        LAUNCH: measured["late_us"],
        PEERS: measured["total_us"] - measured["transfer_us"],
    }  # fmt: skip
    error_us = measured["exposed_us"] - exposed_us
    return {
        "predicted": {
            "total_us": planned.total_us,
            "hidden_us": planned.hidden_us,
            "exposed_us": exposed_us,
        },
        "error_us": error_us,
        "terms": terms,
        "because": because(error_us, planned.total_us, terms),
    }


def because(error_us: float, total_us: float, terms: Mapping[str, float]) -> str:
    """Return what explains the error of a collective that was predicted to take `total_us`."""
    if abs(error_us) <= max(LEAST_US, SHARE * total_us):
        return AS_PREDICTED
    sign = 1.0 if error_us > 0 else -1.0
    best = max(terms, key=lambda name: sign * terms[name])
    return best if sign * terms[best] > 0 else NONE


def constants_of(fits: Mapping[str, Fit]) -> dict[str, Any]:
    """Return each link's constants, measured and of the profile."""
    return {link: {**asdict(fit), "gb_per_s": fit.gb_per_s} for link, fit in fits.items()}
