"""Choose the number of parts of the batch that a program runs in, among the numbers traced.

Contract
    A pure function of the predictions: the order in which programs were tried does not matter.

Pseudo-code
    candidates = programs in parts that gain more than 1 % over the whole, fit the memory, and
        with no constant off lose more than half of their gain as stated
    take the fastest; of those within 0.2 % of it the one of fewest parts
    no candidate: the whole
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_compile.journal.entries import Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.plan.choose_plan import RISK, TIE, WORTH


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedProgram:
    """A program in so many parts, and its predicted time, forward and backward."""

    num_parts: int
    chunks: int | str
    """The value of the option `chunks` it was compiled with."""
    us: float
    off_us: tuple[float, ...]
    """Predicted times with one constant of the profile off, for each constant, up and down."""
    peak_bytes: int

    def __str__(self) -> str:
        """Return its name in reports."""
        parts = "whole" if self.num_parts == 1 else f"{self.num_parts} parts"
        parts += " of one chunk" * (self.num_parts > 1 and self.chunks == 1)
        return f"{parts}, {self.us / 1e3:.2f} ms"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsDecision:
    """The number of parts of the batch that a program runs in, and why no more."""

    num_parts: int = 1
    chunks: int | str = "auto"
    """The value of the option `chunks` from here on."""
    left: Verdict | None = None
    """Why it runs whole; None where it does not, or has nothing to divide."""
    whole_us: float = 0.0
    """Predicted time of the whole; 0 where nothing was predicted."""
    us: float = 0.0
    """Predicted time of the program chosen; 0 where nothing was predicted."""

    @property
    def measures(self) -> dict[str, float]:
        """Return the predictions for reports; {} without any."""
        if not self.whole_us:
            return {}
        return {"predicted_us_before": self.whole_us, "predicted_us": self.us}


def choose_parts(
    whole: TriedProgram, others: Sequence[TriedProgram], allowed_bytes: float
) -> tuple[TriedProgram, Reason | None]:
    """Return the program to run, and why it is the whole if it is.

    The peak of live bytes may exceed that of the whole by `allowed_bytes`.
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
