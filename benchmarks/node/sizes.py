"""How large everything is: on GPUs, and in the smoke run on processors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.link.cases import BASELINE, REORDERED, Case


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """One run of the check."""

    device: str
    collective_timeout_s: float
    """After which a collective is taken to hang; ranks may compile for as long."""
    programs: tuple[str, ...]
    """Of section `bits`; () for all."""
    recipes: tuple[str, ...]
    """Of section `recipes`; () for all."""
    message_bytes: tuple[int, ...]
    """Of section `links`, the least first."""
    repeats: int
    """Times that anything is timed."""
    product: int
    """Rows and columns of a product in section `beside`."""
    beside_bytes: int
    """Of an exchange beside it."""
    least_covered: float
    """Share of rounds in which what runs beside lasts longer than what is timed."""
    case: Case
    """The layer of section `hidden`; sizes of a rank, whatever their number."""
    hidden_variants: tuple[str, ...]
    """By name, Inductor's first."""
    compile_s: float
    """What one variant's compilation may take; with less time left it is not begun."""


GPUS: Final = Sizes(
    device="cuda",
    collective_timeout_s=90.0,
    programs=(),
    recipes=(),
    message_bytes=tuple(4**n * 2**10 for n in range(10)),  # 1 KB to 256 MB
    repeats=15,
    product=4096,
    beside_bytes=64 * 2**20,
    least_covered=0.8,
    # 8192 rows of 8 KB are 67 MB an exchange
    case=Case(
        name="node",
        num_ranks=0,
        tokens=4096,
        experts=64,
        width=4096,
        hidden=2048,
        top_k=2,
        shared_expert=True,
    ),
    hidden_variants=(
        BASELINE,
        REORDERED,
        "megamoe N=1",
        "megamoe N=2",
        "megamoe N=4",
        "exact",
        "exact experts N=2",
        "rounded experts N=2",
        "flat 2 parts N=1",
    ),
    compile_s=40.0,
)
SMOKE: Final = Sizes(
    device="cpu",
    collective_timeout_s=180.0,
    programs=("chunks by load", "attention by heads", "a rank without tokens", "two hops"),
    recipes=("DeepSeek-V3, blocks in parts", "DeepSeek-V3, two hops"),
    message_bytes=(2**10, 2**20),
    repeats=5,
    product=256,
    beside_bytes=2**20,
    least_covered=0.0,
    case=Case(name="smoke", num_ranks=0, tokens=32, experts=8, width=16, hidden=24, top_k=2),
    hidden_variants=("megamoe N=1", "megamoe N=2", "exact", "flat 2 parts N=1"),
    compile_s=1.0,
)
SIZES: Final[Mapping[str, Sizes]] = {"cuda": GPUS, "cpu": SMOKE}

PROMISED_S: Final[Mapping[str, float]] = {
    "beside": 240.0, "links": 120.0, "hidden": 420.0, "bits": 480.0, "recipes": 480.0,
}  # fmt: skip
"""Seconds of each section, in the order they run: of what is left, a section gets its part among
those still to come."""
