"""Time of an order of nodes: host, compute stream, a first-in-first-out link per group.

Contract
    Virtual time from estimated costs. The host does its part for one node after another, and runs
    ahead of the device while that is faster: no node starts before the host is done with it.
    At a read the host waits for the compute stream, and is ahead no more.
    Copies to the host and back share one link, in the order of their nodes.
    Launches of one group share a link and are served in launch order; those of ranks of equal place
    share that of the group whose nodes they join.
    Compute is slower while a collective runs: NCCL's kernels hold some of the SMs. A collective is
    slower while compute runs. Profiles state both shares (`cost/events.py`).

`least_exposed_us` is the least time that collectives cost in any order of a graph's nodes.
It is a lower bound for `simulate` with the launches in the order of the problem: no schedule is
below it; there may be none that reaches it.

Why it holds
    A node runs before every launch from the first that needs it on, and after every collective of
    a group up to the last that it needs. So it can run beside a collective of the group only if one
    stands between these two. While the group's link is busy the compute stream runs such nodes,
    each once, or waits for the host to launch one, or stands still.
    Compute beside a collective is slower, and so is the collective: a unit of a collective takes
    1 + s there, s the slowdown of its group, in which compute loses the share c / (1 + c), c the
    contention. So even hidden communication costs (1 + s) c / (1 + c) of its time.
    Kernels that the host launches one after another wait for it by their launches less the compute
    before each: at most by the excess of launches over their own kernels, and by the longest of
    them. Each collective's launch and each read begins such a row anew.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from moe_compile.cost.events import Served, Streams
from moe_compile.schedule.schedule_problem import ScheduleProblem

COMPUTE: Final = "<compute>"
"""Name of the compute stream; a link has the name of its group."""
HOST: Final = "<host>"
"""Name of the host among the streams of a run."""
COPIES: Final = "<copies>"
"""Name of the link to host memory among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Estimated times of one order."""

    step_us: float
    compute_us: float
    """Sum over the compute stream, its waits for the host to launch kernels included."""
    exchange_us: float
    """Sum over the links, each collective timed with nothing beside it."""
    copy_us: float = 0.0
    """Sum over copies to the host or back."""
    host_us: float
    """Exposed waits of the compute stream for the host to read, or to launch collectives."""

    @property
    def exposed_us(self) -> float:
        """Return the time that collectives and copies cost: compute stood still, or was slower.

        It includes the time by which compute lengthens collectives, once nothing hides it, and the
        stream's waits for the host to read, to unpack integers and to launch collectives.
        """
        return max(0.0, self.step_us - self.compute_us)


@dataclass(frozen=True, slots=True)
class NodeSpan:
    """Time that one node takes on one stream; times in microseconds."""

    node: int
    stream: str
    start_us: float
    end_us: float


class Clock:
    """The state of stream and links while nodes run one after another."""

    def __init__(self, problem: ScheduleProblem, link_factor: float = 1.0) -> None:
        """Start at time 0 with everything idle; exchanges take `link_factor` times as long."""
        self.problem = problem
        self.link_factor = link_factor
        self.now_us = 0.0
        """When the compute stream is done with the work given so far."""
        self.host_us = 0.0
        """When the host is done with the nodes run so far."""
        self.kernels_waited_us = 0.0
        """How long the compute stream waited for the host to launch kernels."""
        self.others_waited_us = 0.0
        """How long it waited for the host for other reasons."""
        self._exchanges: dict[int, Served] = {}
        """Launch -> its exchange."""
        self._last: dict[str, Served] = {}
        """Group -> its last exchange."""
        self._streams = Streams(COMPUTE, problem.contention, problem.overlap_slowdown)
        self._copies = Streams()
        """The link to the host: its copies slow nothing, and nothing slows them."""
        self._runs: list[tuple[int, str, Served]] | None = None
        """Node, stream and task of all that ran, where `spans` are asked for."""

    @classmethod
    def that_keeps_spans(cls, problem: ScheduleProblem) -> Clock:
        """Return a clock that knows its `spans` afterwards."""
        clock = cls(problem)
        clock._runs = []
        return clock

    def spans(self) -> Iterator[NodeSpan]:
        """Yield what ran when, each stream in order of start; of a clock `that_keeps_spans`."""
        for node, stream, served in self._runs or ():
            end_us = served.end if stream == COPIES else self._streams.end_of(served)
            yield NodeSpan(node, stream, served.start, end_us)

    def _keep(self, node: int, stream: str, served: Served) -> None:
        if self._runs is not None:
            self._runs.append((node, stream, served))

    def run(self, node: int) -> None:
        """Run one node at the earliest time allowed."""
        problem = self.problem
        if node in problem.awaits:
            self.now_us = max(self.now_us, self.wait_over_us(node))
            return
        self._pass_host(node)
        if compute_us := problem.compute_us[node]:
            served = self._streams.serve(COMPUTE, self.now_us, compute_us)
            self._keep(node, COMPUTE, served)
            self.now_us = self._streams.end_of(served)
        group = problem.group_of.get(node)
        if group is not None:
            exchange_us = problem.link_us[node] * self.link_factor
            served = self._streams.serve(group, self.now_us, exchange_us)
            self._keep(node, group, served)
            self._exchanges[node] = self._last[group] = served
        if (copy_us := problem.copy_us.get(node)) is not None:
            served = self._copies.serve(COPIES, self.now_us, copy_us * self.link_factor)
            self._keep(node, COPIES, served)
            self._exchanges[node] = served

    def _pass_host(self, node: int) -> None:
        """Let the host do its part for a node; the device starts the node no earlier."""
        if node in self.problem.reads:
            self.host_us = max(self.host_us, self.now_us)
        if host_us := self.problem.host_us[node]:
            self._keep(node, HOST, Served(host_us, self.host_us + host_us, self.host_us))
            self.host_us += host_us
            waited_us = max(0.0, self.host_us - self.now_us)
            self.now_us = max(self.now_us, self.host_us)
            if self.problem.is_kernel(node):
                self.kernels_waited_us += waited_us
            else:
                self.others_waited_us += waited_us

    def host_has_time(self, node: int) -> bool:
        """Whether the host can do its part for a node before the compute stream stands still."""
        return self.host_us + self.problem.host_us[node] <= self.now_us

    def wait_over_us(self, wait: int) -> float:
        """Return when the exchange of `wait` is over if nothing else runs; its launch has run."""
        launch = self.problem.awaits[wait]
        if launch is None:
            return 0.0
        served = self._exchanges[launch]
        return served.end if launch in self.problem.copy_us else self._streams.end_of(served)

    def link_free_us(self, group: str) -> float:
        """Return when a group's link has served its launches if nothing else runs."""
        last = self._last.get(group)
        return 0.0 if last is None else self._streams.end_of(last)

    def end_us(self) -> float:
        """Return when all that has run is over, exchanges that nothing awaits too."""
        return max(self.now_us, self.host_us, self._streams.idle_at(), self._copies.idle_at())


def simulate(
    problem: ScheduleProblem, order: Sequence[int], *, link_factor: float = 1.0
) -> Timeline:
    """Return the estimated times of running the nodes in `order`."""
    clock = Clock(problem, link_factor)
    for node in order:
        clock.run(node)
    return Timeline(
        step_us=clock.end_us(),
        compute_us=sum(problem.compute_us) + clock.kernels_waited_us,
        exchange_us=sum(problem.link_us) * link_factor,
        copy_us=sum(problem.copy_us.values()) * link_factor,
        host_us=clock.others_waited_us,
    )


def least_exposed_us(problem: ScheduleProblem) -> float:
    """Return the most, over groups, that collectives cost if all nodes that can hide them do."""
    groups = dict.fromkeys(problem.group_of.values())
    return max((_least_of_group(problem, group) for group in groups), default=0.0)


def _least_of_group(problem: ScheduleProblem, group: str) -> float:
    ranks = [r for r, n in enumerate(problem.launches) if problem.group_of[n] == group]
    last = [-1] * len(problem.nodes)
    for rank in ranks:
        last[problem.launches[rank]] = rank
    beside = []
    for node, needed in enumerate(problem.before):
        last[node] = max([last[node], *(last[before] for before in needed)])
        between = bisect_right(ranks, last[node])
        if between < len(ranks) and ranks[between] < problem.urgency[node]:
            beside.append(node)
    exchange_us = sum(problem.link_us[problem.launches[rank]] for rank in ranks)
    return _least_cost_us(problem, group, beside, exchange_us)


def _least_cost_us(
    problem: ScheduleProblem, group: str, beside: list[int], exchange_us: float
) -> float:
    """Return the least cost of the group's collectives that the nodes `beside` can hide."""
    left_us = max(0.0, exchange_us - _longest_wait_us(problem, beside))
    slowed = 1.0 + problem.overlap_slowdown.get(group, 0.0)
    slower = 1.0 + problem.contention
    compute_us = sum(problem.compute_us[n] for n in beside)
    hidden_us = min(left_us, compute_us * slower / slowed)
    cost = min(1.0, slowed * problem.contention / slower)
    return left_us - hidden_us * (1.0 - cost)


def _longest_wait_us(problem: ScheduleProblem, beside: list[int]) -> float:
    """Return how long the nodes `beside` can wait for the host to launch them."""
    kernels = [n for n in beside if problem.is_kernel(n)]
    longest_us = max((problem.host_us[n] for n in kernels), default=0.0)
    rows = 1 + sum(us > 0.0 and not problem.is_kernel(n) for n, us in enumerate(problem.host_us))
    longer_us = (problem.host_us[n] - problem.compute_us[n] for n in kernels)
    return rows * longest_us + sum(us for us in longer_us if us > 0.0)
