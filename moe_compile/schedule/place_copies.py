"""Places of copies to the host, and back, in an order of all other nodes.

Contract
    Keeps the order of all other nodes, and every precedence of the problem.
    Copies to the host start right behind the node that makes the tensor, in the order in which
    tensors are made. Each is waited for where it is predicted to be over, but not before the
    tensor's last reader: there its memory is free. At the latest that is the end of the graph.
    Copies back start as late as they are predicted to be over before the first reader, one after
    another on their link, and are waited for right before it: they hold memory from their start.
    Where memory forbids that they start later, at the latest right before the reader.

Copies are no nodes of the search for an order: they take no compute, and nothing needs one early.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from moe_compile.graph.query import is_offload
from moe_compile.schedule.liveness import Liveness
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import Clock

SLOW_LINK: Final = 1.5
"""Factor on estimated times of transfers; a schedule should also hide transfers so slow."""
LEADS: Final = (SLOW_LINK, 1.0, 0.0)
"""Times of a copy by which it starts before it has to be over, the first that memory allows."""


def place_copies(
    problem: ScheduleProblem,
    liveness: Liveness,
    order: Sequence[int],
    allowed_bytes: float = math.inf,
) -> tuple[int, ...]:
    """Return `order` with its copies, and the waits for them, in the places that suit it."""
    placed = tuple(order)
    for lead in LEADS if problem.copy_us else ():
        placed = _Places(problem, liveness, order, lead).order()
        if liveness.peak_bytes(placed) <= allowed_bytes:
            break
    return placed


class _Places:
    """An order without copies, the times of its nodes, and the copies put between them."""

    def __init__(
        self, problem: ScheduleProblem, liveness: Liveness, order: Sequence[int], lead: float
    ) -> None:
        self._problem, self._liveness, self._lead = problem, liveness, lead
        self._waits = {
            launch: wait
            for wait, launch in problem.awaits.items()
            if launch is not None and launch in problem.copy_us
        }
        """Copy -> the wait for it."""
        copies = {*self._waits, *self._waits.values()}
        self._others = [node for node in order if node not in copies]
        self._place = {node: i for i, node in enumerate(self._others)}
        self._last_use = {
            storage: i for i, n in enumerate(self._others) for storage in liveness.uses[n]
        }
        """Storage -> place of the last other node that uses it."""
        self._starts = self._starts_us()
        self._launched: dict[int, list[int]] = defaultdict(list)
        """Place in the others -> copies that start before it."""
        self._awaited: dict[int, list[int]] = defaultdict(list)
        """Place in the others -> waits before it, behind those that start there."""

    def order(self) -> tuple[int, ...]:
        """Return all nodes."""
        offloads = [node for node in self._waits if is_offload(self._problem.nodes[node])]
        reloads = [node for node in self._waits if node not in offloads]
        over_us = 0.0
        for launch in sorted(offloads, key=self._first_place):
            over_us = self._put_offload(launch, over_us)
        free_us = math.inf
        for launch in sorted(reloads, key=self._reader, reverse=True):
            free_us = self._put_reload(launch, free_us)
        placed: list[int] = []
        for i, node in enumerate(self._others):
            placed += (*self._launched[i], *self._awaited[i], node)
        return tuple(placed)

    def _starts_us(self) -> list[float]:
        """Return when each other node starts, by place, and when all are over."""
        clock, starts = Clock(self._problem), []
        for node in self._others:
            starts.append(clock.now_us)
            clock.run(node)
        return [*starts, clock.now_us]

    def _first_place(self, launch: int) -> int:
        """Return the first place where all that a copy needs is there."""
        return 1 + max((self._place[node] for node in self._problem.before[launch]), default=-1)

    def _reader(self, launch: int) -> int:
        """Return the place of the first reader of what a copy brings back."""
        return min(self._place[reader] for reader in self._problem.after[self._waits[launch]])

    def _put_offload(self, launch: int, over_us: float) -> float:
        """Put a copy to the host and its wait; return when it is over, as the next may start."""
        first, end = self._first_place(launch), len(self._others) - 1
        over_us = max(over_us, self._starts[first]) + self._lead * self._problem.copy_us[launch]
        made = {storage for storage, _ in self._liveness.allocates[launch]}
        source = (one for one in self._liveness.uses[launch] if one not in made)
        free = 1 + max((self._last_use[one] for one in source), default=first)
        self._launched[first].append(launch)
        place = bisect_left(self._starts, over_us, min(free, end), end)
        self._awaited[place].append(self._waits[launch])
        return over_us

    def _put_reload(self, launch: int, free_us: float) -> float:
        """Put a copy back and its wait; return its start, before which the one before has to end.

        Copies are put from the last to the first.
        """
        reader = self._reader(launch)
        length_us = self._lead * self._problem.copy_us[launch]
        start_us = min(self._starts[reader], free_us) - length_us
        place = bisect_right(self._starts, start_us, 0, reader + 1) - 1
        self._launched[max(place, self._first_place(launch))].insert(0, launch)
        self._awaited[reader].insert(0, self._waits[launch])
        return start_us
