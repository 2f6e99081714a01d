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
    """Timelines of the layers of one graph for one micro-batch; times are those of one layer."""

    phases: tuple[TaskTimeline, ...]
    """Forward, backward; or both at once, of two micro-batches."""
    num_layers: int = 1

    @property
    def total_us(self) -> float:
        """Return forward plus backward."""
        return sum(phase.total_us for phase in self.phases) / self.num_layers

    @property
    def exposed_us(self) -> float:
        """Return the time in which nothing was computed."""
        return sum(phase.exposed_us for phase in self.phases) / self.num_layers

    @property
    def link_us(self) -> float:
        """Return how long collectives that are tasks of their own ran, slower beside compute."""
        busy = (phase.busy_us(link) for phase in self.phases for link in (LINK, NODE_LINK))
        return sum(busy) / self.num_layers


def time_layer(costs: LayerCosts) -> LayerTime:
    """Return the timelines of the layer under the method of `costs`.

    Raises InvalidConfig when the method cannot divide the model.
    """
    return LayerTime(
        phases=tuple(_run(tasks, costs) for tasks in tasks_of(costs)),
        num_layers=costs.method.blocks_per_graph,
    )


def tasks_of(costs: LayerCosts) -> list[TaskList]:
    """Return the tasks of forward and backward, of all layers of a graph; or both in one list.

    Raises InvalidConfig when the method cannot divide the model.
    """
    costs.method.check(costs.model)
    forward, backward = TaskList(), TaskList()
    if costs.method.overlap is Overlap.TWO_BATCHES:
        backward = forward
    parts, blocks = _parts(costs), costs.method.blocks_per_graph
    ends: dict[str, list[int]] = {}
    for _ in range(blocks):
        for part, label in parts:
            layer = LayerTasks(costs=part, tasks=forward, label=label)
            ends[label] = [layer.add_forward(ends.get(label))]
    ends = {}
    for left in reversed(range(blocks)):
        for part, label in parts:
            layer = LayerTasks(costs=part, tasks=backward, label=label)
            ends[label] = [layer.add_backward(ends.get(label), is_last=not left)]
    return [forward] if forward is backward else [forward, backward]


def bound_us(costs: LayerCosts) -> float:
    """Return the time of the layer were collectives free."""
    ideal = replace(costs.method, overlap=Overlap.IDEAL, batch_parts=1, blocks_per_graph=1)
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
