"""How long an order of nodes takes: one compute stream, one first-in-first-out link per group.

Contract
    Virtual time from estimated costs; the host is taken to run ahead of the device.
    Launches of one group share a link and are served in launch order; those of ranks of equal place
    share that of the group whose nodes they join.
    Compute is slower while a collective runs: NCCL's kernels hold some of the SMs. A collective is
    slower while compute runs. By how much of either, profiles state (`cost/events.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moe_compile.cost.events import Served, Streams
from moe_compile.schedule.schedule_problem import ScheduleProblem

COMPUTE: Final = "<compute>"
"""Name of the compute stream; a link is called as its group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Estimated times of one order."""

    step_us: float
    compute_us: float
    """Sum over the compute stream."""
    exchange_us: float
    """Sum over the links, each collective as it takes with nothing beside it."""

    @property
    def exposed_us(self) -> float:
        """Return the time that collectives cost: the compute stream stood still, or was slower.

        What compute beside them makes collectives longer is part of it once nothing hides it.
        """
        return max(0.0, self.step_us - self.compute_us)


class Clock:
    """The state of stream and links while nodes run one after another."""

    def __init__(self, problem: ScheduleProblem, link_factor: float = 1.0) -> None:
        """Start at time 0 with everything idle; exchanges take `link_factor` times as long."""
        self.problem = problem
        self.link_factor = link_factor
        self.now_us = 0.0
        self._exchanges: dict[int, Served] = {}
        """By launch."""
        self._streams = Streams(COMPUTE, problem.contention, problem.overlap_slowdown)

    def run(self, node: int) -> None:
        """Run one node at the earliest time allowed."""
        problem = self.problem
        if node in problem.awaits:
            self.now_us = max(self.now_us, self.wait_over_us(node))
            return
        if compute_us := problem.compute_us[node]:
            served = self._streams.serve(COMPUTE, self.now_us, compute_us)
            self.now_us = self._streams.end_of(served)
        group = problem.group_of.get(node)
        if group is not None:
            exchange_us = problem.link_us[node] * self.link_factor
            self._exchanges[node] = self._streams.serve(group, self.now_us, exchange_us)

    def wait_over_us(self, wait: int) -> float:
        """Return when what `wait` waits for is there if nothing else runs; its launch has run."""
        launch = self.problem.awaits[wait]
        return 0.0 if launch is None else self._streams.end_of(self._exchanges[launch])

    def end_us(self) -> float:
        """Return when all that has run is over, exchanges that nothing awaits too."""
        return max(self.now_us, self._streams.idle_at())


def simulate(
    problem: ScheduleProblem, order: Sequence[int], *, link_factor: float = 1.0
) -> Timeline:
    """Return the estimated times of running the nodes in `order`."""
    clock = Clock(problem, link_factor)
    for node in order:
        clock.run(node)
    return Timeline(
        step_us=clock.end_us(),
        compute_us=sum(problem.compute_us),
        exchange_us=sum(problem.link_us) * link_factor,
    )
