"""Medians, and intervals of medians, of measurements made in turn.

Contract
    The same numbers give the same interval: resampling is seeded.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A median and where it lies with 95 % confidence (percentile bootstrap)."""

    median: float
    low: float
    high: float
    num_pairs: int


def ratio(measured: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Return the median of the ratios within rounds; entry i of both comes from round i.

    What slows a whole round, another job say, cancels.
    """
    return estimate([m / b for m, b in zip(measured, baseline, strict=True)])


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median of `values` with its interval; raises ValueError when there are none."""
    if not values:
        raise ValueError("no measurement")
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    outside = (1.0 - CONFIDENCE) / 2.0
    return Estimate(
        median=statistics.median(values),
        low=medians[int(outside * RESAMPLES)],
        high=medians[int((1.0 - outside) * RESAMPLES) - 1],
        num_pairs=len(values),
    )
