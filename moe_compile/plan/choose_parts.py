"""Choose in how many parts of its batch a program runs, of what was traced for some numbers.

Contract
    A pure function of the predictions: the order in which programs were tried does not matter.

Pseudo-code
    of the programs in parts that gain more than 1 % over the whole, fit the memory, and with no
    constant off lose more than half of what they gain as stated,
        the fastest; of those within 0.2 % of it the one of fewest parts
    none: the whole
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_compile.journal.entries import Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.plan.choose_plan import RISK, TIE, WORTH


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedProgram:
    """A program in so many parts, and what it is predicted to take, forward and backward."""

    num_parts: int
    chunks: int | str
    """The option of that name with which it was made."""
    us: float
    off_us: tuple[float, ...]
    """Where one constant of the profile is off, for each, up and down."""
    peak_bytes: int

    def __str__(self) -> str:
        """Return what reports call it."""
        parts = "whole" if self.num_parts == 1 else f"{self.num_parts} parts"
        parts += " of one chunk" * (self.num_parts > 1 and self.chunks == 1)
        return f"{parts}, {self.us / 1e3:.2f} ms"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsDecision:
    """In how many parts a program runs, and why in no more."""

    num_parts: int = 1
    chunks: int | str = "auto"
    """What the option of that name stands at from here on."""
    left: Verdict | None = None
    """Why it runs whole; None where it does not, or has nothing that could be divided."""
    whole_us: float = 0.0
    """Predicted of the whole; 0 where nothing was predicted."""
    us: float = 0.0
    """Predicted of what was chosen; likewise."""

    @property
    def measures(self) -> dict[str, float]:
        """Return the predictions as reports have them; {} without."""
        if not self.whole_us:
            return {}
        return {"predicted_us_before": self.whole_us, "predicted_us": self.us}


def choose_parts(
    whole: TriedProgram, others: Sequence[TriedProgram], allowed_bytes: float
) -> tuple[TriedProgram, Reason | None]:
    """Return the program to run, and why it is the whole if it is.

    `allowed_bytes` may be added to the peak of live bytes of the whole.
    """
    gaining = [one for one in others if one.us < (1.0 - WORTH) * whole.us]
    fitting = [one for one in gaining if one.peak_bytes - whole.peak_bytes <= allowed_bytes]
    safe = [one for one in fitting if _is_safe(one, whole)]
    if not safe:
        return whole, Reason.MEMORY_CAP if gaining and not fitting else Reason.BY_PRICE
    limit = (1.0 + TIE) * min(one.us for one in safe)
    near = [one for one in safe if one.us <= limit]
    return min(near, key=lambda one: (one.num_parts, one.chunks != 1, one.us)), None


def _is_safe(one: TriedProgram, whole: TriedProgram) -> bool:
    limit = 1.0 + RISK * (1.0 - one.us / whole.us)
    pairs = zip(one.off_us, whole.off_us, strict=True)
    return all(own < limit * as_whole for own, as_whole in pairs)
