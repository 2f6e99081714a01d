"""Losses of one way against those of bf16, seed by seed, and the bars they are held to.

Contract
    Runs of one seed are paired: equal weights at the start, equal batches. What differs between
    seeds is in neither bar but as a measure.
    close     |mean difference of the last `LAST` steps| is below `SHARE` of the standard deviation
              that bf16's own losses have over seeds
    level     the difference has no trend over the last `TREND` steps: the mean over seeds of its
              least-squares slope is within Student's bounds, `CONFIDENCE` two-sided, of zero
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

LAST: Final = 20
"""Steps whose mean is a run's loss: one step's varies by its batch."""
TREND: Final = 100
"""Steps over which a difference may have a trend."""
SHARE: Final = 0.5
CONFIDENCE: Final = 0.99
STUDENT: Final = (63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250)
"""Student's t for `CONFIDENCE`, two-sided, by degrees of freedom from 1 on (any table of it)."""
SEEDS: Final = range(3, len(STUDENT) + 2)
"""Numbers of seeds that can be compared: of two, no standard deviation is worth a bar."""

Losses = Mapping[int, Sequence[float]]
"""Seed -> the loss of every step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One way against bf16; losses are in nats per token."""

    loss: float
    """Mean over seeds of the loss at the end."""
    difference: float
    """Mean over seeds of what it is above bf16's."""
    difference_error: float
    """Standard error of that mean."""
    spread: float
    """Standard deviation over seeds of bf16's loss at the end."""
    slope: float
    """Mean over seeds of the trend of the difference, per `TREND` steps."""
    slope_error: float
    """Standard error of that mean."""
    largest_slope: float
    """Largest slope, either way, that is no trend."""
    is_close: bool
    is_level: bool


def compare(losses: Losses, base: Losses) -> Comparison:
    """Return the comparison of runs with those of bf16.

    Raises ValueError where seeds differ or are too few or too many, a run is shorter than `TREND`
    steps, or a run has the losses of bf16: then nothing was rounded otherwise.
    """
    seeds = sorted(losses)
    if seeds != sorted(base) or len(seeds) not in SEEDS:
        raise ValueError(f"seeds {seeds} and {sorted(base)}: compare {SEEDS[0]} to {SEEDS[-1]}")
    gaps = [[a - b for a, b in zip(losses[s], base[s], strict=True)] for s in seeds]
    if min(map(len, gaps)) < TREND:
        raise ValueError(f"runs of {min(map(len, gaps))} steps: a trend is of {TREND}")
    if not all(map(any, gaps)):
        raise ValueError("a run has every loss of bf16's: its numbers were not rounded otherwise")
    difference, difference_error = _mean([end_of(gap) for gap in gaps])
    slope, slope_error = _mean([TREND * slope_of(gap[-TREND:]) for gap in gaps])
    spread = statistics.stdev(end_of(base[s]) for s in seeds)
    largest = STUDENT[len(seeds) - 2] * slope_error
    return Comparison(
        loss=statistics.fmean(end_of(losses[s]) for s in seeds),
        difference=difference,
        difference_error=difference_error,
        spread=spread,
        slope=slope,
        slope_error=slope_error,
        largest_slope=largest,
        is_close=abs(difference) < SHARE * spread,
        is_level=abs(slope) <= largest,
    )


def end_of(values: Sequence[float]) -> float:
    """Return the mean of the last `LAST` values."""
    return statistics.fmean(values[-LAST:])


def slope_of(values: Sequence[float]) -> float:
    """Return the slope per step of the line with the least squares through `values`."""
    return statistics.linear_regression(range(len(values)), values).slope


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
