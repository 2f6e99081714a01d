"""Scheduling problems cut from the graphs that megamoe schedules: parts of chunked layers.

What is cut out becomes a graph of its own: what it reads from before is given, what is read of it
later is returned.
"""

import random
from dataclasses import dataclass, replace
from unittest import mock

import torch.fx as fx

from moe_compile.cost.cost_model import estimate_costs, waits_for_device
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import is_launch
from moe_compile.hardware import HardwareProfile, load_profile
from moe_compile.hardware.profile import NO_HOST, HostCosts
from moe_compile.schedule.liveness import Liveness
from moe_compile.schedule.schedule_problem import ScheduleProblem
from passes import schedule_exchanges

HOSTS = (
    NO_HOST,
    HostCosts(read_us=10.0, integer_us=0.5, launch_us=5.0, launch_us_per_rank=5.0, kernel_us=1.0),
)
MOST_NODES = 40
"""Nodes of a problem that take time, or wait."""
LEAST_LAUNCHES = 3


@dataclass(frozen=True)
class Kind:
    """What a schedule looks at of a node itself."""

    op: str


def graphs_scheduled(step):
    """Run `step`, which compiles with megamoe; return copies of the graphs that it schedules."""
    found = []
    run = schedule_exchanges.ScheduleExchanges.run

    def keep(self, graph, state):
        copied = fx.Graph()
        env = {}
        copied.output(copied.graph_copy(graph, env))
        for node, copy in env.items():
            copy.meta = dict(node.meta)
        found.append(copied)
        return run(self, graph, state)

    with mock.patch.object(schedule_exchanges.ScheduleExchanges, "run", keep):
        step()
    return [graph for graph in found if any(map(is_launch, graph.nodes))]


def cut_graph(graph, first, last):
    """Return the nodes `first` to `last` as a graph of their own."""
    nodes = list(graph.nodes)
    inside = [n for n in nodes[first:last] if n.op not in ("placeholder", "get_attr", "output")]
    mine, cut, env = set(inside), fx.Graph(), {}
    for node in dict.fromkeys(a for n in inside for a in n.all_input_nodes if a not in mine):
        env[node] = cut.placeholder(node.name)
    for node in inside:
        env[node] = cut.node_copy(node, env.__getitem__)
    for node, copy in env.items():
        copy.meta = dict(node.meta)
    cut.output(tuple(env[n] for n in inside if not set(n.users) <= mine))
    return cut


def drawn_problems(graphs, number, seed):
    """Return (problem, liveness) of `number` drawn parts, at drawn speeds, of one or two links.

    Of half of them the host takes time. In every fourth it reads, and takes time for that.
    """
    draw = random.Random(seed)
    bounds = [(graph, *part) for graph in graphs for part in _parts(graph)]
    with_read = [part for part in bounds if any(map(waits_for_device, cut_graph(*part).nodes))]
    return [
        _problem(draw.choice(with_read), HOSTS[1:], draw)
        if i % 4 == 0
        else _problem(draw.choice(bounds), HOSTS, draw)
        for i in range(number)
    ]


def _parts(graph):
    """Yield where parts begin and end that have as many nodes as may be, and launches enough."""
    sizes = NominalSizes({})
    sizes.learn(graph)
    timed = _timed(ScheduleProblem.of(graph, estimate_costs(graph, sizes, load_profile("cpu"))))
    launches = [is_launch(node) for node in graph.nodes]
    last = 0
    for first in range(0, len(timed), 5):
        while last < len(timed) and sum(timed[first : last + 1]) <= MOST_NODES:
            last += 1
        if sum(launches[first:last]) >= LEAST_LAUNCHES:
            yield first, last


def _problem(part, hosts, draw):
    graph = part[0]
    sizes = NominalSizes({})
    sizes.learn(graph)
    cut = cut_graph(*part)
    slow = HardwareProfile(
        name="drawn",
        matmul_tflops=1e-3,
        memory_gb_per_s=draw.choice((1.0, 10.0)),
        op_overhead_us=draw.choice((0.0, 1.0)),
        link_gb_per_s=10 ** draw.uniform(-3.0, -1.0),
        link_latency_us=1.0,
        host=draw.choice(hosts),
    )
    problem = ScheduleProblem.of(cut, estimate_costs(cut, sizes, slow))
    groups = draw.choice((("all",), ("one", "other")))
    return (
        replace(
            problem,
            nodes=tuple(Kind(node.op) for node in problem.nodes),
            group_of={launch: draw.choice(groups) for launch in problem.launches},
        ),
        Liveness.of(problem.nodes, sizes),
    )


def _timed(problem):
    exchanges = problem.awaits.keys() | problem.group_of.keys()
    return [us > 0 or node in exchanges for node, us in enumerate(problem.compute_us)]
