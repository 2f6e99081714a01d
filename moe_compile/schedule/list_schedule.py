"""List scheduling: at each step run the most useful of the nodes that can run now.

Contract
    Every order returned keeps all precedences and the order of launches of the problem.
    A wait stands directly before the first node that reads it; so does a follower.
    Near-linear: each node enters and leaves a heap once.

Pseudo-code
    candidates = compute whose inputs are ready, exchanges that are over by now included
    run the one nearest to the next launch, then with the longest path behind it
    no candidate: let time pass until the next exchange is over
    (patient) a node does not start if an exchange that an earlier launch needs is over long before
              it would end
    a launch that its link cannot start yet, and for which the host has no time, lets others pass
    (sparing the host) so does one on an idle link; with no others, an exchange that is over before
              the host could launch is waited for
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

from moe_compile.schedule.liveness import MemoryHeadroom
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import Clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The rule that chooses among candidates."""

    key: Callable[[ScheduleProblem, int], tuple[float, ...]]
    """Sort key, smallest first; ties go to graph order."""
    patience: float = 0.0
    """Share of a filler's time that may be spent idle, for nodes that an earlier launch needs."""
    spares_host: bool = False
    """Whether launches let others pass until the host has time for them, on an idle link too."""


def nearest_launch(problem: ScheduleProblem, node: int) -> tuple[float, ...]:
    """Key: nodes the earliest launch needs, then the longest path; nodes no launch needs last."""
    return (problem.urgency[node], -problem.path_us[node])


def first_result(problem: ScheduleProblem, node: int) -> tuple[float, ...]:
    """Key: nodes that the earliest launch needs; of the others those of one result, then the next.

    A value made for one result and read by it alone so lives only while that result is made.
    """
    return (problem.urgency[node], problem.first_result[node], -problem.path_us[node])


def longest_path(problem: ScheduleProblem, node: int) -> tuple[float, ...]:
    """Key: the longest path to the end first."""
    return (-problem.path_us[node],)


def graph_order(problem: ScheduleProblem, node: int) -> tuple[float, ...]:
    """Key: nodes that a launch needs first, each kind in graph order."""
    return (float(math.isinf(problem.urgency[node])),)


def incoming_order(problem: ScheduleProblem) -> list[int]:
    """Return the graph's own order, changed only as far as the order of launches demands."""
    missing = problem.num_missing()
    ready = [i for i, count in enumerate(missing) if not count]
    order: list[int] = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for successor in problem.successors(node):
            missing[successor] -= 1
            if not missing[successor]:
                heapq.heappush(ready, successor)
    return order


def list_schedule(
    problem: ScheduleProblem, policy: Policy, room: MemoryHeadroom | None = None
) -> list[int]:
    """Return an order of the nodes by `policy`, within `room`."""
    return _Run(problem, policy, room).order()


class _Run:
    """One list scheduling, under way."""

    def __init__(
        self, problem: ScheduleProblem, policy: Policy, room: MemoryHeadroom | None
    ) -> None:
        self.problem = problem
        self.policy = policy
        self.room = room
        self.clock = Clock(problem)
        self.missing = problem.num_missing()
        self.is_placed = [False] * len(problem.nodes)
        self.placed: list[int] = []
        self.candidates: list[tuple[float | int, ...]] = []  # (*key, node)
        self.in_flight: list[tuple[float, int]] = []  # (when it is over, wait)

    def order(self) -> list[int]:
        nodes = self.problem.nodes
        inputs = [i for i, node in enumerate(nodes) if node.op in ("placeholder", "get_attr")]
        for node in inputs:
            self._place(node)
        roots = [i for i, count in enumerate(self.missing) if not count and not self.is_placed[i]]
        self._settle(roots + self._freed_by(inputs))
        while (chosen := self._next()) is not None:
            self._place(chosen)
            self._settle(self._freed_by([chosen]))
        for node in range(len(nodes)):  # waits that nothing reads, then the output
            if not self.is_placed[node]:
                self._place(node)
        return self.placed

    def _next(self) -> int | None:
        """Return the node to run now; let time pass when there is none."""
        while True:
            while (over_us := self._next_over_us()) is not None and over_us <= self.clock.now_us:
                self._settle(self._freed_by([heapq.heappop(self.in_flight)[1]]))
            if (chosen := self._take()) is not None:
                return chosen
            if over_us is not None:
                self.clock.now_us = max(self.clock.now_us, over_us)
            elif self.candidates:
                return self._free_room()
            else:
                return None

    def _take(self) -> int | None:
        """Take the first candidate that memory has room for, unless standing still is better."""
        left: list[tuple[float | int, ...]] = []
        chosen, put_off = None, None
        while self.candidates:
            left.append(heapq.heappop(self.candidates))
            node = int(left[-1][-1])
            if self.room is None or self.room.fits(self._pulled_by(node)):
                if self._better_later(node):
                    put_off = node
                    continue
                chosen = None if self._better_wait(node) else node
                break
        if chosen is None and put_off is not None and not self._better_idle(put_off):
            chosen = put_off
        for entry in left:
            if entry[-1] != chosen:
                heapq.heappush(self.candidates, entry)
        return chosen

    def _free_room(self) -> int:
        """Return the candidate that the known order runs next, when no candidate has room.

        Waits and followers in front of it run at once: what they read may be free after them.
        """
        assert self.room is not None
        ready = {int(entry[-1]): entry for entry in self.candidates}
        while (node := self.room.next_known()) not in ready:
            self._place(node)
        self.candidates.remove(ready[node])
        heapq.heapify(self.candidates)
        return node

    def _next_over_us(self) -> float | None:
        """Return when the next exchange is over; compute since its launch delays it."""
        while self.in_flight:
            was_us, wait = self.in_flight[0]
            over_us = self.clock.wait_over_us(wait)
            if over_us <= was_us:
                return over_us
            heapq.heapreplace(self.in_flight, (over_us, wait))
        return None

    def _better_wait(self, node: int) -> bool:
        """Whether to idle for a node that an earlier launch needs, rather than start `node`."""
        if not self.in_flight or not self.policy.patience:
            return False
        problem = self.problem
        over_us, wait = self.in_flight[0]
        idle = over_us - self.clock.now_us
        return problem.urgency[wait] < problem.urgency[node] and (
            idle < self.policy.patience * problem.compute_us[node]
        )

    def _better_later(self, node: int) -> bool:
        """Whether to compute before launching `node`: its link is busy until the host has time."""
        group = self.problem.group_of.get(node)
        if group is None or self.clock.host_has_time(node):
            return False
        if self.policy.spares_host:
            return True
        return self.clock.link_free_us(group) > self.clock.host_us + self.problem.host_us[node]

    def _better_idle(self, node: int) -> bool:
        """Whether an exchange is over, and frees others, before the host could launch `node`."""
        over_us = self._next_over_us() if self.policy.spares_host else None
        launched_us = self.clock.host_us + self.problem.host_us[node]
        return over_us is not None and over_us < launched_us

    def _place(self, node: int) -> None:
        """Run `node`, after the followers and waits that it needs."""
        for needed in sorted(self._pulled_by(node)):
            self.is_placed[needed] = True
            self.clock.run(needed)
            self.placed.append(needed)
            if self.room is not None:
                self.room.run(needed)

    def _pulled_by(self, node: int) -> set[int]:
        """Return `node` and the nodes it needs that have not run."""
        pulled = {node}
        todo = [node]
        while todo:
            for needed in self.problem.before[todo.pop()]:
                if not self.is_placed[needed] and needed not in pulled:
                    pulled.add(needed)
                    todo.append(needed)
        return pulled

    def _freed_by(self, nodes: list[int]) -> list[int]:
        """Return the nodes whose last missing precedence is among `nodes`."""
        freed: list[int] = []
        for node in nodes:
            for successor in self.problem.successors(node):
                self.missing[successor] -= 1
                if not self.missing[successor]:
                    freed.append(successor)
        return freed

    def _settle(self, freed: list[int]) -> None:
        """Make `freed` candidates; followers do not wait to be run: they free others at once."""
        problem = self.problem
        while freed:
            node = freed.pop()
            if problem.is_follower[node]:
                freed.extend(self._freed_by([node]))
            elif node in problem.awaits:
                heapq.heappush(self.in_flight, (self.clock.wait_over_us(node), node))
            elif problem.nodes[node].op != "output":
                heapq.heappush(self.candidates, (*self.policy.key(problem, node), node))
