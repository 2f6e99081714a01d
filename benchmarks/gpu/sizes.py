"""How large everything is: on a GPU, and in the smoke run on a processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.link.cases import BASELINE, REORDERED, Case

SMOKE_OURS: Final = "megamoe N=2 without code"
OVERLAP_SCHEDULING: Final = "inductor overlap scheduling"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """One run of the check."""

    device: str
    row_counts: tuple[int, ...]
    """Rows of a message."""
    widths: tuple[int, ...]
    """Columns; those Inductor is compared at first."""
    least_footprint: int
    """Bytes that the inputs and outputs of one timed replay have at least: several caches."""
    kernel_rounds: int
    case: Case
    layer_variants: tuple[str, ...]
    """The most telling first; the baseline before all."""
    link_variants: tuple[str, ...]
    compile_s: float
    """What one variant's compilation may take; with less time left it is not begun."""
    rounds_s: float
    """Kept free for the rounds of the link section while its variants compile."""
    control_rounds: int
    rounds: int
    tests: tuple[str, ...]
    """Files and folders of unit tests."""


H200: Final = Sizes(
    device="cuda",
    row_counts=(4096, 16384, 65536),
    widths=(4096, 7168, 2048),
    least_footprint=8 * 60 * 2**20,  # an H200 has 60 MB of L2
    kernel_rounds=25,
    # 32768 rows of 8 KB are 268 MB an exchange, as 4096 tokens to eight experts each would send
    case=Case(
        name="one-gpu", num_ranks=1, tokens=16384, experts=8, width=4096, hidden=2048, top_k=2
    ),
    layer_variants=(BASELINE, "megamoe N=4", "megamoe N=2", "megamoe N=4 fp8", "megamoe N=1"),
    link_variants=(
        BASELINE,
        "megamoe N=4",
        REORDERED,
        "megamoe N=4 fp8",
        "megamoe N=2",
        OVERLAP_SCHEDULING,
        "megamoe N=1",
    ),
    compile_s=25.0,
    rounds_s=60.0,
    control_rounds=20,
    rounds=15,
    tests=(
        "tests/ops",
        "tests/graph",
        "tests/plan",
        "tests/passes/test_verify_schedule.py",
        "tests/test_config.py",
        "tests/backend/test_strict.py",
        "tests/backend/test_dropped_pass.py",
    ),
)

SMOKE: Final = Sizes(
    device="cpu",
    row_counts=(16,),
    widths=(256,),
    least_footprint=0,
    kernel_rounds=2,
    case=Case(name="smoke", num_ranks=1, tokens=32, experts=4, width=16, hidden=24, top_k=2),
    layer_variants=(BASELINE, "megamoe N=2"),
    link_variants=(BASELINE, SMOKE_OURS),
    compile_s=1.0,
    rounds_s=1.0,
    control_rounds=3,
    rounds=3,
    tests=("tests/cost/test_sizes.py",),
)

SIZES: Final[Mapping[str, Sizes]] = {"cuda": H200, "cpu": SMOKE}

PROMISED_S: Final[Mapping[str, float]] = {
    "kernels": 120, "slices": 60, "layer": 300, "trace": 240, "link": 480, "tests": 280,
}  # fmt: skip
"""Parts of the time for each section, in the order they run: of what is left, a section gets its
part among those still to come. In all, seconds of 25 minutes."""
