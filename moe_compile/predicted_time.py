"""Predicted time of a Dynamo graph, traced through every level that it would run.

Contract
    A function of the graph, the options and the hardware profile; nothing is measured, no code is
    generated, and neither the graph nor the state is changed.
    A graph that no level would run on is priced in the order in which it is written. Passes come to
    bodies of higher-order operators later: one with an all-to-all counts as one with a region.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.fx as fx
from torch._guards import TracingContext, detect_fake_mode, tracing

from moe_compile.codegen import trace_graphs
from moe_compile.cost.amounts import Amounts
from moe_compile.cost.cost_model import estimate_costs
from moe_compile.cost.rates import perturbed_profiles
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import is_all_to_all, value_of
from moe_compile.graph.snapshot import copy_of_graph
from moe_compile.hardware import HardwareProfile
from moe_compile.journal.entries import Journal
from moe_compile.plan.state import CompileState
from moe_compile.schedule.liveness import Liveness
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import simulate
from moe_compile.schedule.timeline import timeline_of
from moe_compile.schedule.timeline_data import AS_WRITTEN, packed


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """Predictions for a program, forward and backward."""

    us: float
    """Time, microseconds to three digits."""
    off_us: tuple[float, ...]
    """Times of the same order of nodes with each constant of the profile off, up and down."""
    peak_bytes: int
    """Peak of live bytes, in the phase where it is larger."""


def predicted_us(gm: fx.GraphModule, state: CompileState, *, is_rewritten: bool) -> float:
    """Return the predicted time of `gm`, forward and backward, microseconds to three digits.

    `is_rewritten` says that later levels run on it even where `state` has no work for them.
    """
    phases = _phases(gm, state, is_rewritten=is_rewritten)
    return round(sum(phase.step_us(state.hardware) for phase in phases), 3)


def predicted(gm: fx.GraphModule, state: CompileState) -> Predicted:
    """Return the predictions for `gm`, on which the passes on Dynamo graphs have run."""
    phases = _phases(gm, state, is_rewritten=False)

    def us(hardware: HardwareProfile) -> float:
        return round(sum(phase.step_us(hardware) for phase in phases), 3)

    return Predicted(
        us=us(state.hardware),
        off_us=tuple(map(us, perturbed_profiles(state.hardware))),
        peak_bytes=max((phase.peak_bytes() for phase in phases), default=0),
    )


PHASES: Final = ("forward", "backward")


def timelines_as_written(
    gm: fx.GraphModule, inputs: Sequence[Any], state: CompileState
) -> list[dict[str, str]]:
    """Return the timelines of a program without any pass, as a report has them.

    `state` is that of the compilation of the same program, for its place and options.
    """
    found = []
    plain = CompileState(config=state.config, hardware=state.hardware)
    for phase, traced in zip(
        PHASES, trace_graphs(copy_of_graph(gm), inputs, plain, ()), strict=False
    ):
        sizes = NominalSizes(plain.nominal_sizes)
        sizes.learn(traced.graph)
        timeline = _Phase(traced.graph, sizes, plain).timeline()
        found.append({"where": state.site, "phase": phase, "timeline": timeline})
    return found


class _Phase:
    """The forward or the backward graph, in its order."""

    def __init__(self, graph: fx.Graph, sizes: NominalSizes, state: CompileState) -> None:
        """Read the graph once, for any hardware."""
        self._graph, self._sizes = graph, sizes
        self._amounts: dict[fx.Node, Amounts] = {}
        costs = estimate_costs(graph, sizes, state.hardware, self._amounts)
        keeps_program = not state.config.equal_tokens
        self._problem = ScheduleProblem.of(graph, costs, keeps_program=keeps_program)

    def step_us(self, hardware: HardwareProfile) -> float:
        costs = estimate_costs(self._graph, self._sizes, hardware, self._amounts)
        nodes = self._problem.nodes
        priced = dataclasses.replace(
            self._problem,
            compute_us=tuple(costs[n].compute_us for n in nodes),
            link_us=tuple(costs[n].link_us for n in nodes),
            host_us=tuple(costs[n].host_us for n in nodes),
        )
        return simulate(priced, range(len(nodes))).step_us

    def timeline(self) -> str:
        order = range(len(self._problem.nodes))
        liveness = Liveness.of(self._problem.nodes, self._sizes)
        return packed(timeline_of(self._problem, liveness, self._sizes, {AS_WRITTEN: order}))

    def peak_bytes(self) -> int:
        nodes = self._problem.nodes
        return Liveness.of(nodes, self._sizes).peak_bytes(range(len(nodes)))


def _phases(gm: fx.GraphModule, state: CompileState, *, is_rewritten: bool) -> list[_Phase]:
    apart = dataclasses.replace(
        state,
        journal=Journal(),
        measures={},
        nominal_sizes={},
        dropped=[],
        on_pass_failed=None,
        is_priced=True,
    )
    apart.withdraw(())
    apart.has_work |= is_rewritten or any(map(is_all_to_all, _nodes_of_bodies(gm)))
    inputs = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
    phases = []
    with tracing(TracingContext(detect_fake_mode(inputs))):
        for traced in trace_graphs(gm, inputs, apart):
            sizes = NominalSizes(apart.nominal_sizes)
            sizes.learn(traced.graph)
            phases.append(_Phase(traced.graph, sizes, apart))
    return phases


def _nodes_of_bodies(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for body in gm.modules():
        if body is not gm and isinstance(body, fx.GraphModule):
            yield from body.graph.nodes
