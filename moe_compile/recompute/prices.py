"""Prices of computing a tensor again, for torch's solver: alone, and where the backward waits.

Contract
    Pure arithmetic on the cost model's times and on the default partition's scheduled backward; the
    same on every rank. Whatever is chosen by them is priced by the schedule afterwards.

What is computed again reads only kept tensors and inputs. So it may run at any time before its
first reader, and costs little where the compute stream stands still meanwhile, and a link is busy.
Such time before the reader is given to the tensors that the default partition keeps, those with the
most bytes for each microsecond first. One microsecond of compute beside a collective lasts 1 + c,
c the contention, and the collective loses the share s / (1 + s) of that, s its slowdown.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch.fx as fx
from torch._inductor import custom_graph_pass

from moe_compile.cost.amounts import is_free
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import COMPUTE, HOST, Clock

LEAST_US = 1e-3
"""Price of what takes no time by the model: of two such, torch's solver then keeps the larger."""

_Estimator: type = getattr(custom_graph_pass, "CustomRuntimeEstimator", object)
"""Base of estimators; a torch without it takes any callable."""


class PricedByName(_Estimator):
    """Prices of nodes by name, microseconds, as torch's partitioner asks for them."""

    def __init__(self, us: Mapping[str, float]) -> None:
        """Take the prices; what has none takes no time."""
        self._us = us

    def __call__(self, node: fx.Node) -> float:
        """Return the price of computing `node` again."""
        return max(LEAST_US, self._us.get(node.name, 0.0))

    def uuid(self) -> None:
        """Return None: prices are set only while the partitioner runs, where no key is made."""


def beside_waits(
    us: Mapping[str, float],
    kept: Mapping[fx.Node, int],
    problem: ScheduleProblem,
    order: Sequence[int],
) -> dict[str, float]:
    """Return prices `us` less what fits into times when the scheduled backward waits for a link.

    `kept` are the nodes of the default partition's forward that its backward is given, with their
    bytes; `problem` and `order` are those of that backward.
    """
    slowed = max(problem.overlap_slowdown.values(), default=0.0)
    cost = min(1.0, (1.0 + problem.contention) * slowed / (1.0 + slowed))
    idle, first_read = _idle_and_reads(problem, order)
    found = dict(us)

    def bytes_per_us(node: fx.Node) -> float:
        return kept[node] / max(us.get(node.name, 0.0), LEAST_US)

    for node in sorted(kept, key=bytes_per_us, reverse=True):
        until = min((first_read[name] for name in _names(node) if name in first_read), default=0.0)
        hidden = _take(idle, us.get(node.name, 0.0), until)
        found[node.name] = us.get(node.name, 0.0) - hidden * (1.0 - cost)
    return found


def _names(node: fx.Node) -> Iterator[str]:
    """Yield the names of a node and of views of its tensor: the backward may be given any."""
    yield node.name
    for user in node.users:
        if user.op == "call_function" and is_free(user):
            yield from _names(user)


def _idle_and_reads(
    problem: ScheduleProblem, order: Sequence[int]
) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """Return when compute stands still beside a link, and when each input is first read."""
    clock = Clock.that_keeps_spans(problem)
    reached: dict[fx.Node, float] = {}
    for index in order:
        reached[problem.nodes[index]] = clock.now_us
        clock.run(index)
    spans = list(clock.spans())
    computing = sorted((s.start_us, s.end_us) for s in spans if s.stream == COMPUTE)
    moving = sorted((s.start_us, s.end_us) for s in spans if s.stream not in (COMPUTE, HOST))
    still = [(a[1], b[0]) for a, b in itertools.pairwise([(0.0, 0.0), *computing])]
    idle = [
        (max(start, begin), min(end, stop))
        for start, end in still
        for begin, stop in _joined(moving)
        if min(end, stop) > max(start, begin)
    ]
    inputs = [n for n in problem.nodes if n.op == "placeholder"]
    reads = {n.name: min(_reads(n, reached), default=0.0) for n in inputs}
    return idle, reads


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans that overlap or touch as one; they come in order of their starts."""
    joined: list[tuple[float, float]] = []
    for start, end in spans:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _reads(node: fx.Node, reached: Mapping[fx.Node, float]) -> Iterator[float]:
    """Yield when each reader of a tensor runs, or of a view of it."""
    for user in node.users:
        if user.op == "call_function" and is_free(user):
            yield from _reads(user, reached)
        else:
            yield reached[user]


def _take(idle: list[tuple[float, float]], us: float, until: float) -> float:
    """Take at most `us` of idle time before `until`, the latest first; return how much."""
    taken = 0.0
    for number in reversed(range(len(idle))):
        start, end = idle[number]
        end = min(end, until)
        if end <= start or taken >= us:
            continue
        part = min(us - taken, end - start)
        taken += part
        idle[number : number + 1] = [(start, end - part), (end, idle[number][1])]
    return taken
