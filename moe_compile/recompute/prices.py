"""Prices of computing a step again: alone, and where the backward waits for a link.

Contract
    Pure arithmetic on the cost model's times and on the default partition's scheduled backward; the
    same on every rank. Whatever is chosen by them is priced by the schedule afterwards.

What is computed again reads only kept tensors and inputs. So it may run at any time before its
first reader, and costs little where the compute stream stands still meanwhile, and a link is busy.
One microsecond of compute beside a collective lasts 1 + c, c the contention, and the collective
loses the share s / (1 + s) of that, s its slowdown. Each step is priced as if it had all of such
time before its first reader to itself: what is computed again for the readers of a block takes
less than its exchanges, or else the prices alone decide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch.fx as fx

from moe_compile.cost.amounts import is_free
from moe_compile.recompute.storages import Storages
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import COMPUTE, HOST, Clock

LEAST_NS: Final = 1
"""Price of what takes no time by the model: of two such, what is kept decides."""


def in_ns(us: float) -> int:
    """Return a time in whole nanoseconds, at least one."""
    return max(LEAST_NS, round(1e3 * us))


def beside_waits(
    storages: Storages,
    us: Mapping[str, float],
    problem: ScheduleProblem,
    order: Sequence[int],
) -> list[int]:
    """Return nanoseconds of each step, less what fits into the backward's waits for a link.

    `us` are the times of the steps by name; `problem` and `order` are those of the scheduled
    backward of the default partition.
    """
    slowed = max(problem.overlap_slowdown.values(), default=0.0)
    cost = min(1.0, (1.0 + problem.contention) * slowed / (1.0 + slowed))
    idle, first_read = _idle_and_reads(problem, order)
    until = _needed_by(storages, first_read)
    found = []
    for number, step in enumerate(storages.steps):
        before = sum(max(0.0, min(end, until[number]) - start) for start, end in idle)
        hidden = min(us[step.name], before)
        found.append(in_ns(us[step.name] - hidden * (1.0 - cost)))
    return found


def _needed_by(storages: Storages, first_read: Mapping[str, float]) -> list[float]:
    """Return when the backward first needs each step, as far as the times of its inputs say."""
    until = [math.inf] * len(storages.steps)
    for name, at in first_read.items():
        if name in storages.places:
            number = storages.made_by[storages.places[name]]
            until[number] = min(until[number], at)
    for number, step in reversed([*enumerate(storages.steps)]):
        if step.is_free_to_choose or step.is_forced:
            for storage in step.reads:
                maker = storages.made_by[storage]
                until[maker] = min(until[maker], until[number])
    return until


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
