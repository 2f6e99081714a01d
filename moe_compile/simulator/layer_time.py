"""How long one layer takes, forward and backward, and when each of its tasks runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_compile.cost.tasks import (
    LINK,
    NODE_LINK,
    TaskList,
    TaskTimeline,
    run_in_order,
    run_tasks,
)
from moe_compile.simulator.layer_costs import LayerCosts
from moe_compile.simulator.layer_tasks import LayerTasks
from moe_compile.simulator.method import Overlap


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    """Timelines of one layer for one micro-batch."""

    phases: tuple[TaskTimeline, ...]
    """Forward, backward; or both at once, of two micro-batches."""

    @property
    def total_us(self) -> float:
        """Return forward plus backward."""
        return sum(phase.total_us for phase in self.phases)

    @property
    def exposed_us(self) -> float:
        """Return the time in which nothing was computed."""
        return sum(phase.exposed_us for phase in self.phases)

    @property
    def link_us(self) -> float:
        """Return how long collectives that are tasks of their own ran, slower beside compute."""
        return sum(phase.busy_us(link) for phase in self.phases for link in (LINK, NODE_LINK))


def time_layer(costs: LayerCosts) -> LayerTime:
    """Return the timelines of the layer under the method of `costs`.

    Raises InvalidConfig when the method cannot divide the model.
    """
    costs.method.check(costs.model)
    overlap = costs.method.overlap
    forward, backward = TaskList(), TaskList()
    if overlap is Overlap.TWO_BATCHES:
        backward = forward
    for part, label in _parts(costs):
        LayerTasks(costs=part, tasks=forward, label=label).add_forward()
    for part, label in _parts(costs):
        LayerTasks(costs=part, tasks=backward, label=label).add_backward()
    lists = [forward] if forward is backward else [forward, backward]
    return LayerTime(phases=tuple(_run(tasks, costs) for tasks in lists))


def bound_us(costs: LayerCosts) -> float:
    """Return the time of the layer were collectives free."""
    ideal = replace(costs.method, overlap=Overlap.IDEAL, batch_parts=1)
    return time_layer(replace(costs, method=ideal)).total_us


def _parts(costs: LayerCosts) -> list[tuple[LayerCosts, str]]:
    num = costs.method.batch_parts
    if num == 1:
        return [(costs, "")]
    return [(costs.of_part(1.0 / num), f"{part}. ") for part in range(num)]


def _run(tasks: TaskList, costs: LayerCosts) -> TaskTimeline:
    if costs.method.overlap is Overlap.SEQUENTIAL:
        return run_in_order(tasks.tasks)
    return run_tasks(
        tasks.tasks,
        costs.link.contention,
        costs.link.overlap_slowdown,
        node_slowdown=costs.profile.nvlink.overlap_slowdown,
    )
