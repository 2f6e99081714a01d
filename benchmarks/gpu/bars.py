"""What the check on one GPU is held to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from benchmarks.bars import Look, no_failure
from benchmarks.link.cases import BASELINE
from moe_compile.check.tables import Section

MOST_COMPILE: Final = 2.0
"""Times the compilation of one chunk that four chunks of a bare layer may take."""
LEAST_OF_COPY: Final = 0.7
"""Of the bandwidth of a copy, that a kernel of quantised rows reaches at the largest size."""
MORE_KERNELS: Final = 15
"""Than in one chunk, that two chunks may launch in the forward, and in the backward."""
OURS: Final = "megamoe N=4"
SETTING: Final = "1:1"


def _kernels(section: Section) -> tuple[bool, str]:
    largest = max(row["rows"] for row in section["rows"])
    least = min(row["fraction_of_copy"] for row in section["rows"] if row["rows"] == largest)
    return least >= LEAST_OF_COPY, f"{least:.2f} of a copy"


def _row(rows: Iterable[Mapping[str, Any]], **values: str) -> Mapping[str, Any]:
    for row in rows:
        if all(row[key] == value for key, value in values.items()):
            return row
    raise LookupError(", ".join(values.values()))


def _compile(section: Section) -> tuple[bool, str]:
    one, four = (_row(section["rows"], variant=f"megamoe N={n}")["compile_s"] for n in (1, 4))
    return four <= MOST_COMPILE * one, f"x {four / one:.2f}"


def _kernels_of_chunks(section: Section) -> tuple[bool, str]:
    one, two = (_row(section["rows"], variant=f"megamoe N={n}") for n in (1, 2))
    more = [two[f"{phase}_kernels"] - one[f"{phase}_kernels"] for phase in ("forward", "backward")]
    return max(more) <= MORE_KERNELS, " and ".join(f"{n:+d}" for n in more)


def _overlap(section: Section) -> tuple[bool, str]:
    found = _row(section["rows"], setting=SETTING, variant=OURS)["vs_best_inductor"]
    return found["high"] < 1.0, f"{found['median']:.3f} ({found['low']:.3f}-{found['high']:.3f})"


BARS: Final[tuple[tuple[str, str, Look], ...]] = (
    ("kernels", "quantised rows equal plain PyTorch", no_failure),
    ("kernels", f"quantised rows at {LEAST_OF_COPY} of a copy's bandwidth", _kernels),
    ("slices", "products of some experts have the bits of all", no_failure),
    ("layer", f"errors near {BASELINE}'s, products under exchanges both ways", no_failure),
    ("layer", f"four chunks compile in {MOST_COMPILE} x one chunk's time", _compile),
    ("trace", "one copy to the host forward, none backward", no_failure),
    ("trace", f"two chunks launch at most {MORE_KERNELS} kernels more", _kernels_of_chunks),
    ("link", f"{OURS} is faster than Inductor's best at {SETTING}, emulated", _overlap),
    ("tests", "tests pass on this torch and GPU", no_failure),
)
"""Section, what is wanted, and how it is told."""
