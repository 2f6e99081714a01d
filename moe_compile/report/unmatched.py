"""Exchanges that belong to no region: why, and what the user can do.

Contract
    Speaks of all-to-alls only: gathers and reductions, as of sharded parameters, are no candidates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from moe_compile.journal.reasons import Kind, Reason
from moe_compile.regions.regions import Refused

SAME_GRAPH: Final = (
    "in the same graph: torch.compile(..., fullgraph=True) says where a graph breaks; around "
    "DistributedDataParallel Dynamo cuts graphs unless torch._dynamo.config.optimize_ddp = False"
)
REMEDIES: Final = {
    Reason.NO_COMBINE: "send the rows back by an all-to-all with the same two split lists, swapped"
    f", {SAME_GRAPH}",
    Reason.NO_COUNT_EXCHANGE: "take the split sizes from an exchange of the counts per expert, an "
    f"all-to-all or an all-gather of integers, {SAME_GRAPH}",
    Reason.UNEVEN_EXPERTS: "give every rank the same number of experts",
    Reason.EVEN_SPLITS: "nothing if it dispatches no tokens; dispatch by capacity, in equal "
    "parts, is not rewritten in this version",
    Reason.INTEGER_PAYLOAD: "nothing if nothing but integers is to be exchanged here",
}
"""What to change; of the most telling reason first."""
OTHERWISE: Final = "the operator named is what to change, or nothing if this is no expert dispatch"
NO_CANDIDATES: Final = frozenset(
    {Reason.NOT_ALL_TO_ALL, Reason.COUNT_EXCHANGE, Reason.PART_OF_REGION}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unmatched:
    """An exchange without a region."""

    name: str
    reason: Reason
    detail: str
    is_region: bool
    """Whether a dispatch, its counts and its combine were matched, and then refused."""

    def __str__(self) -> str:
        """Return `name: reason (detail)`."""
        return f"{self.name}: {self.reason.value}" + (f" ({self.detail})" if self.detail else "")

    @property
    def remedy(self) -> str:
        """What the user can do about it."""
        return REMEDIES.get(self.reason, OTHERWISE)

    @property
    def is_dispatch(self) -> bool:
        """Whether it moves rows as an expert dispatch does, and so was meant to be a region."""
        return self.is_region or self.reason.kind is Kind.UNPROVEN


def unmatched(others: Iterable[Refused]) -> list[Unmatched]:
    """Return the exchanges among `others`, the most telling first."""
    found = [
        Unmatched(name=d.candidate, reason=d.reason, detail=d.detail, is_region=d.is_region)
        for d in others
        if d.reason not in NO_CANDIDATES
    ]
    order = list(REMEDIES)
    return sorted(
        found,
        key=lambda u: (not u.is_region, order.index(u.reason) if u.reason in order else len(order)),
    )
