"""What this rank ran on one process group, call by call, as far as it was compiled by us.

Contract
    Noting a call takes a fraction of a microsecond and talks to nobody. The newest `REMEMBERED`
    calls can be looked up from another thread while the main thread goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

REMEMBERED: Final = 4096
"""Calls; no rank can be so far ahead of another one that it exchanges with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What one compiled callable is to the other ranks of a group."""

    order: str
    """Digest of the user's collectives on that group."""
    plan: str
    """Digest of what we made of the program; "" where it runs as the user wrote it."""
    collectives: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    family: str = ""
    """Where in the user's source it stands, the options, and the sizes of its weights: programs
    of one family are those between which a call may choose by the sizes of its inputs."""
    is_promised: bool = False
    """Whether ranks promise to have equal sizes, and so to choose alike."""

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "order": self.order,
            "plan": self.plan,
            "collectives": list(self.collectives),
            "places": list(self.places),
        }


class Journal:
    """The calls of one group, and the plans its ranks agreed on."""

    def __init__(self, key: str, group: str, ranks: list[int]) -> None:
        """Start empty; `key` is what all ranks of the group call it in the store."""
        self.key = key
        self.group = group
        self.ranks = ranks
        self.num_calls = 0
        self.agreed: dict[str, set[str]] = {}
        """Digest of the user's collectives -> plans that all ranks ran them by."""
        self._plans: dict[tuple[str, str], set[str]] = {}
        """The same by place too, of programs that ranks may choose between apart."""
        self.published: set[int] = set()
        """Positions this rank published before it ran them."""
        self._recent: list[tuple[int, Program] | None] = [None] * REMEMBERED
        """Position, the first being 1, and what ran there; one object, as another thread reads."""

    def note(self, program: Program) -> None:
        """Take down that the next call runs `program`; said before it launches anything."""
        position = self.num_calls + 1
        self._recent[position % REMEMBERED] = (position, program)
        self.num_calls = position

    def at(self, position: int) -> Program | None:
        """Return what ran at `position`; None if that is forgotten."""
        call = self._recent[position % REMEMBERED]
        return call[1] if call is not None and call[0] == position else None

    def must_ask(self, program: Program) -> bool:
        """Whether others may not launch what `program` launches, for all that this rank knows.

        What is rewritten always: another rank may run these collectives anew too, and otherwise.
        The user's own order needs no consent as long as ranks never ran these collectives in
        another one.
        """
        return bool(program.plan) or any(self.agreed.get(program.order, ()))

    def is_second(self, program: Program) -> bool:
        """Whether all ranks ran the like of `program` by another plan, or by none, before.

        With both to choose from, by its own sizes, a rank would run one while others run the other.
        """
        return bool(program.plan and self.plans_of(program) - {program.plan})

    def plans_of(self, program: Program) -> set[str]:
        """Return the plans by which all ranks ran the like of `program`."""
        return self._plans.get((program.order, program.family), set())

    def agree(self, program: Program) -> None:
        """All ranks run `program`."""
        self.agreed.setdefault(program.order, set()).add(program.plan)
        if not program.is_promised:
            key = program.order, program.family
            self._plans.setdefault(key, set()).add(program.plan)
