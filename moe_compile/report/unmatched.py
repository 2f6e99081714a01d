"""Exchanges that belong to no region: why, and what the user can do.

Contract
    Speaks of all-to-alls, and of gathers of tokens for experts: other gathers and reductions, as of
    sharded parameters, are no candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from moe_compile.journal.reasons import Reason
from moe_compile.journal.remedies import ACTED_ON, REMEDIES
from moe_compile.regions.regions import Refused

TELLING: Final = (
    Reason.NOT_AN_EXCHANGE,
    Reason.NO_COMBINE,
    Reason.NO_COUNT_EXCHANGE,
    Reason.SPLIT_OTHERWISE,
    Reason.COUNTS_NOT_COUNTED,
    Reason.UNEVEN_EXPERTS,
    Reason.TOKENS_GATHERED,
    Reason.EVEN_SPLITS,
    Reason.NO_ROWS,
)
"""The most telling reason first; all others after these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unmatched:
    """An exchange without a region."""

    name: str
    reason: Reason
    detail: str
    is_region: bool
    """Whether a dispatch, its counts and its combine were matched, and then refused."""
    where: str
    """The user's line of it; "" where that is not known."""

    @property
    def why(self) -> str:
        """Return `reason (detail)`."""
        return self.reason.value + (f" ({self.detail})" if self.detail else "")

    def __str__(self) -> str:
        """Return `name: reason (detail)`."""
        return f"{self.name}: {self.why}"

    @property
    def remedy(self) -> str:
        """What the user can do about it."""
        return REMEDIES[self.reason]

    @property
    def is_dispatch(self) -> bool:
        """Whether it moves rows as an expert dispatch does, and so was meant to be a region."""
        return self.is_region or self.reason.kind in ACTED_ON


def unmatched(others: Iterable[Refused], places: Mapping[str, str]) -> list[Unmatched]:
    """Return the exchanges among `others`, the most telling first; `places` are theirs by name."""
    found = [
        Unmatched(
            name=d.candidate,
            reason=d.reason,
            detail=d.detail,
            is_region=d.is_region,
            where=places.get(d.candidate, ""),
        )
        for d in others
        if d.is_candidate
    ]
    rank = {reason: place for place, reason in enumerate(TELLING)}
    return sorted(found, key=lambda u: (not u.is_region, rank.get(u.reason, len(rank))))
