"""Reorder a post-grad graph so that exchanges and copies run under compute that needs neither.

Contract
    Requires  FUNCTIONAL.
    Keeps     every node and edge, and all precedences (`graph/precedence.py`).
    The order of collectives depends on the graph's structure alone, the same on every rank. Without
    the promise of `equal_tokens` ranks may have other dependences: only all-to-alls of one region,
    one after another, then change places (`graph/launch_order.py`).
    The compute that fills the time between is chosen by estimated time, within
    `max_memory_increase`.

Pseudo-code
    costs = estimates at nominal sizes
    order of launches = by level of dependence
    order of nodes = the fastest list schedule that memory allows
    copies to the host and back = placed in that order (`schedule/place_copies.py`)
    move the nodes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch.fx as fx

from moe_compile.cost.cost_model import Cost, estimate_costs, us_by_bound
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.edit import reorder
from moe_compile.graph.launch_order import record_launch_order
from moe_compile.graph.query import is_launch, overload_name, starts_transfer
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState
from moe_compile.schedule.choose_schedule import ChosenOrder, choose_schedule
from moe_compile.schedule.liveness import Liveness
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import least_exposed_us, simulate
from moe_compile.schedule.timeline import timeline_of
from moe_compile.schedule.timeline_data import AFTER, BEFORE, packed
from passes.contract import Fact, GraphPass

HIDDEN: Final = "as much compute as is useful already runs between launch and wait"


@dataclass(frozen=True)
class ScheduleExchanges(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "schedule_exchanges"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    after: ClassVar[frozenset[str]] = frozenset({"split_addends", "unpack_integers"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Choose the order, move the nodes, report each exchange."""
        launches = [node for node in graph.nodes if is_launch(node)]
        if not state.config.schedule or not any(map(starts_transfer, graph.nodes)):
            return PassReport(pass_name=self.name)
        if any(overload_name(node).startswith("streams::") for node in graph.nodes):
            skipped = tuple(_skipped(n, Reason.USER_STREAMS) for n in launches)
            return PassReport(pass_name=self.name, skipped=skipped)
        sizes = NominalSizes(state.nominal_sizes)
        sizes.learn(graph)
        costs = estimate_costs(graph, sizes, state.hardware)
        config = state.config
        problem = ScheduleProblem.of(
            graph,
            costs,
            keeps_program=not config.equal_tokens,
            is_in_parts=state.is_in_parts,
        )
        liveness = Liveness.of(problem.nodes, sizes)
        choice = choose_schedule(
            problem,
            liveness,
            config.max_memory_increase,
            config.step_peak_bytes,
            is_chunked=state.is_chunked,
        )

        reorder([problem.nodes[i] for i in choice.chosen.order])
        record_launch_order(problem.nodes[i] for i in problem.launches)
        graph.lint()
        applied, skipped = _verdicts(problem, choice)
        if not state.is_priced:
            state.timeline = _timeline(problem, liveness, sizes, choice, skipped)
        return PassReport(
            pass_name=self.name,
            applied=applied,
            skipped=skipped,
            measures={
                **_measures(problem, choice),
                **_bounds(costs),
                **_of_copies(problem, choice.chosen.order),
            },
        )


def _timeline(
    problem: ScheduleProblem,
    liveness: Liveness,
    sizes: NominalSizes,
    choice: ChosenOrder,
    skipped: Sequence[Verdict],
) -> str:
    """Return the packed timeline of the graph as it came and as it is now."""
    orders = {BEFORE: choice.as_it_came.order, AFTER: choice.chosen.order}
    verdicts = {verdict.candidate: verdict for verdict in skipped}
    found = timeline_of(problem, liveness, sizes, orders, verdicts)
    if choice.is_capped:
        found["uncapped_us"] = round(simulate(problem, choice.fastest.order).step_us, 3)
    return packed(found)


def _verdicts(
    problem: ScheduleProblem, choice: ChosenOrder
) -> tuple[tuple[str, ...], tuple[Verdict, ...]]:
    """Return the exchanges that now overlap other compute, and verdicts on those that do not."""
    before = _overlapped(problem, choice.as_it_came.order)
    after = _overlapped(problem, choice.chosen.order)
    applied: list[str] = []
    skipped: list[Verdict] = []
    for launch in problem.launches:
        node = problem.nodes[launch]
        if before[launch] != after[launch]:
            applied.append(node.name)
        elif after[launch]:
            skipped.append(_skipped(node, Reason.ALREADY_DONE, HIDDEN))
        elif choice.is_capped:
            skipped.append(_skipped(node, Reason.MEMORY_CAP))
        else:
            skipped.append(_skipped(node, Reason.NO_INDEPENDENT_COMPUTE))
    return tuple(applied), tuple(skipped)


def _skipped(launch: fx.Node, reason: Reason, detail: str = "") -> Verdict:
    return Verdict(candidate=launch.name, reason=reason, detail=detail)


def _overlapped(problem: ScheduleProblem, order: Sequence[int]) -> dict[int, frozenset[int]]:
    """Return, per launch, the compute that runs between it and its wait."""
    wait_of = {launch: wait for wait, launch in reversed(list(problem.awaits.items()))}
    position = {node: i for i, node in enumerate(order)}
    return {
        launch: frozenset(
            node
            for node in order[position[launch] + 1 : position[wait_of[launch]]]
            if problem.compute_us[node] and node not in problem.group_of
        )
        if launch in wait_of
        else frozenset()
        for launch in problem.launches
    }


def _bounds(costs: Mapping[fx.Node, Cost]) -> dict[str, float]:
    """Return the compute stream's time by bound."""
    return {f"{bound.value}_bound_us": us for bound, us in us_by_bound(costs.values()).items()}


def _of_copies(problem: ScheduleProblem, order: Sequence[int]) -> dict[str, float]:
    """Return the time of copies to the host or back, and by how much they lengthen the step."""
    if not problem.copy_us:
        return {}
    free = replace(problem, copy_us=dict.fromkeys(problem.copy_us, 0.0))
    found = simulate(problem, order)
    exposed_us = max(0.0, found.step_us - simulate(free, order).step_us)
    return {"copy_us": found.copy_us, "copy_exposed_us": exposed_us}


def _measures(problem: ScheduleProblem, choice: ChosenOrder) -> dict[str, float]:
    before = simulate(problem, choice.as_it_came.order)
    after = simulate(problem, choice.chosen.order)
    return {
        "compute_us": after.compute_us,
        "exchange_us": after.exchange_us,
        "exposed_us_before": before.exposed_us,
        "exposed_us": after.exposed_us,
        "host_us": after.host_us,
        "least_exposed_us": least_exposed_us(problem),
        "step_us": after.step_us,
        "peak_bytes_before": float(choice.as_it_came.peak_bytes),
        "peak_bytes": float(choice.chosen.peak_bytes),
        "num_launches": float(len(problem.launches)),
        "contention": problem.contention,
        "overlap_slowdown": max(problem.overlap_slowdown.values(), default=0.0),
    }
