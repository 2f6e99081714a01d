"""How long a Dynamo graph is predicted to take, traced through every level that it would run.

Contract
    A function of the graph, the options and the hardware profile; nothing is measured, no code is
    generated, and neither the graph nor the state is changed.
    A graph that no level would run on is priced in the order in which it is written. Passes come to
    bodies of higher-order operators later: one with an all-to-all counts as one with a region.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch.fx as fx
from torch._guards import TracingContext, detect_fake_mode, tracing

from moe_compile.codegen import trace_graphs
from moe_compile.cost.cost_model import estimate_costs
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import is_all_to_all, value_of
from moe_compile.journal.entries import Journal
from moe_compile.plan.state import CompileState
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import simulate


def predicted_us(gm: fx.GraphModule, state: CompileState, *, is_rewritten: bool) -> float:
    """Return the predicted time of `gm`, forward and backward, microseconds to three digits.

    `is_rewritten` says that later levels run on it even where `state` has no work for them.
    """
    apart = dataclasses.replace(
        state, journal=Journal(), measures={}, nominal_sizes={}, dropped=[], tell_dropped=None
    )
    apart.leave_out(())
    apart.has_work |= is_rewritten or any(map(is_all_to_all, _nodes_of_bodies(gm)))
    inputs = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
    with tracing(TracingContext(detect_fake_mode(inputs))):
        graphs = [traced.graph for traced in trace_graphs(gm, inputs, apart)]
    return round(sum(_step_us(graph, apart) for graph in graphs), 3)


def _nodes_of_bodies(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for body in gm.modules():
        if body is not gm and isinstance(body, fx.GraphModule):
            yield from body.graph.nodes


def _step_us(graph: fx.Graph, state: CompileState) -> float:
    sizes = NominalSizes(state.nominal_sizes)
    sizes.learn(graph)
    costs = estimate_costs(graph, sizes, state.hardware)
    keeps_program = not state.config.equal_tokens
    problem = ScheduleProblem.of(graph, costs, keeps_program=keeps_program)
    return simulate(problem, range(len(problem.nodes))).step_us
