"""Where nothing moves, the last collectives of a group are compared: of code that ran before too.

Contract
    As long as collectives are launched nothing is read but their count, and nothing is said. After
    `STILL_S` without one the first rank of a group says which its last were, by torch's flight
    recorder, and each other rank that stands still compares. What differs was launched: a rank that
    is late launched nothing else. Without a recorder nothing is known.
"""

from __future__ import annotations

import time
from typing import Any, Final

from moe_compile.runtime.answers import ONE_SIDED, REMEDY
from moe_compile.runtime.call_log import Journal
from moe_compile.runtime.rank_store import RankStore

STILL_S: Final = 1.5
SAID: Final = 64
"""How many of its last collectives a rank says."""


class Standstill:
    """What one watcher knows of the groups on which nothing moves."""

    def __init__(self, rank: int, store: RankStore) -> None:
        """Speak for `rank` through `store`."""
        self._rank, self._store = rank, store
        self._seen: dict[str, tuple[int, float]] = {}
        self._compared: dict[str, tuple[int, int]] = {}

    def is_near(self) -> bool:
        """Whether some group stands still that did not a while ago: others are soon heard of."""
        now = time.monotonic()
        return any(0.5 < now - since < 4 * STILL_S for count, since in self._seen.values() if count)

    def look(self, journal: Journal) -> str:
        """Return what ranks launched differently on the group of `journal`; "" for nothing."""
        count, now = journal.count.at_most() or 0, time.monotonic()
        before, since = self._seen.get(journal.key, (0, now))
        if count != before or not count:
            self._seen[journal.key] = count, now
            return ""
        return self._compare(journal, count) if now - since > STILL_S else ""

    def _compare(self, journal: Journal, count: int) -> str:
        key, first = f"{journal.key}/still", journal.ranks[0]
        theirs = None if self._rank == first else self._store.peek(key)
        known = count, theirs["count"] if theirs is not None else 0
        if self._compared.get(journal.key) == known:
            return ""
        self._compared[journal.key] = known
        mine = journal.count.recent() if theirs is not None or self._rank == first else {}
        if self._rank == first:
            last = dict(sorted(mine.items())[-SAID:])
            self._store.put(key, {"count": count, "last": last, "at": _place(journal)})
        return "" if theirs is None else self._conflict(journal, theirs, mine)

    def _conflict(self, journal: Journal, theirs: dict[str, Any], mine: dict[int, str]) -> str:
        for number, said in sorted((int(n), said) for n, said in theirs["last"].items()):
            if mine.get(number, said) != said:
                first = journal.ranks[0]
                return (
                    f"ranks {first} and {self._rank} (of ranks {journal.ranks}) launched different "
                    f"collectives on process group {journal.group!r}: number {number} of all, "
                    f"compiled or not, is {said} on rank {first}, whose compiled code came "
                    f"{theirs['at']}, and {mine[number]} on rank {self._rank}, whose came "
                    f"{_place(journal)}. {ONE_SIDED} {REMEDY}"
                )
        return ""


def _place(journal: Journal) -> str:
    call = journal.last()
    if call is None:
        return "to nothing yet"
    return f"to collectives {call.start + 1} to {call.end}, at {call.program.places[0]}"
