"""Which ranks share a node: what is stored, and what groups and hosts do not fit together."""

import dataclasses

import pytest
import torch.distributed as dist
import torch.fx as fx
from torch.distributed.device_mesh import init_device_mesh

from moe_compile.cost.cost_model import Cost
from moe_compile.errors import InvalidConfig
from moe_compile.graph.query import C10D
from moe_compile.runtime.node_groups import (
    NodeGroups,
    Seat,
    check_seats,
    node_groups_of,
    register_node_groups,
)
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import simulate
from tests.node_ranks import seat

RANKS = (4, 5, 6, 7, 8, 9)
"""Of a group that is not the default one."""


def seats(num_local, ranks=RANKS):
    nodes = [ranks[i : i + num_local] for i in range(0, len(ranks), num_local)]
    return [
        Seat(rank=rank, host=f"host {b}", node=node, cross=ranks[place::num_local])
        for b, node in enumerate(nodes)
        for place, rank in enumerate(node)
    ]


@pytest.mark.parametrize("num_local", [1, 2, 3, 6])
def test_full_nodes_in_order_are_taken(num_local):
    assert check_seats(RANKS, seats(num_local)) == num_local


def refused(seats, ranks=RANKS):
    with pytest.raises(InvalidConfig) as error:
        check_seats(ranks, seats)
    return str(error.value)


def changed(place, **values):
    found = seats(2)
    return [*found[:place], dataclasses.replace(found[place], **values), *found[place + 1 :]]


def test_nodes_must_divide_the_group():
    ranks = RANKS[:5]
    said = refused([dataclasses.replace(s, cross=(s.rank,)) for s in seats(2)[:4]], ranks)
    assert "a group of 5 ranks must divide into nodes of 2 ranks each, and does not" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"node": (6,)}, "the node of rank 4 has 2 ranks, and the node of rank 6 has 1: all"),
        (
            {"node": (7, 6)},
            "the node group of rank 6 is [7, 6], but by the order of the whole group",
        ),
        ({"node": (6, 8)}, "it must be [6, 7]"),
        ({"cross": (4, 8, 6)}, "the cross group of rank 6 is [4, 8, 6]"),
        ({"cross": (4, 6)}, "it must be [4, 6, 8]"),
        ({"rank": 3}, "must be in the group [4, 5, 6, 7, 8, 9], and rank 3 is not"),
        ({"host": "host 0"}, "ranks 4 and 6 are on two nodes, on the hosts 'host 0' and 'host 0'"),
        ({"host": "host 5"}, "ranks 6 and 7 share a node, on the hosts 'host 5' and 'host 1'"),
    ],
)
def test_what_does_not_fit_is_said_with_the_ranks(change, said):
    assert said in refused(changed(2, **change))


def stored(rank, num_nodes):
    seat(rank, num_nodes)
    return node_groups_of(dist.group.WORLD.group_name)


def test_every_rank_stores_its_own_groups_and_its_place(four_ranks):
    found = four_ranks.run(stored, 2)
    assert [(one.num_nodes, one.num_local, one.place) for one in found] == [
        (2, 2, 0), (2, 2, 1), (2, 2, 0), (2, 2, 1)
    ]  # fmt: skip
    assert [one.num_nodes for one in four_ranks.run(stored, 4)] == [4] * 4


def on_one_machine(rank):
    """Register by the machine's own name, which all ranks of the test have."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "place"))
    try:
        register_node_groups(dist.group.WORLD, mesh.get_group("place"), mesh.get_group("node"))
    except InvalidConfig as error:
        return str(error)
    return ""


def test_all_ranks_are_told_the_same(four_ranks):
    (said,) = set(four_ranks.run(on_one_machine))
    assert "ranks 0 and 2 are on two nodes" in said
    assert "pass `host`" in said


def one_link_for(rank, groups, steps_us):
    """Seat two nodes; return how long exchanges of so many microseconds take that are under way at
    once, in groups of these kinds."""
    seat(rank, 2)
    whole = dist.group.WORLD.group_name
    nodes = node_groups_of(whole)
    names = {"all": whole, "node": nodes.node, "cross": nodes.cross}
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    launches = [
        graph.call_function(C10D.all_to_all_single.default, (rows, [1], [1], names[kind]))
        for kind in groups
    ]
    waits = [graph.call_function(C10D.wait_tensor.default, (launch,)) for launch in launches]
    graph.output(tuple(waits))
    costs = dict.fromkeys(graph.nodes, Cost())
    costs |= {n: Cost(link_us=us) for n, us in zip(launches, steps_us, strict=True)}
    problem = ScheduleProblem.of(graph, costs)
    return simulate(problem, range(len(problem.nodes))).step_us


@pytest.mark.parametrize(
    ("groups", "step_us"),
    [
        (("cross", "all"), 10.0 + 4.0),
        (("node", "cross"), 10.0),
        (("node", "all"), 10.0),
        (("cross", "node", "all"), 10.0 + 3.0),
    ],
)
def test_equal_places_leave_a_node_by_the_adapters_of_all_its_ranks(four_ranks, groups, step_us):
    """Exchanges among them and among all ranks follow one another; a node's run beside both."""
    steps_us = (10.0, 4.0) if len(groups) == 2 else (10.0, 9.0, 3.0)
    assert four_ranks.run(one_link_for, groups, steps_us) == [step_us] * 4


def forgotten(rank):
    return node_groups_of(dist.group.WORLD.group_name)


def test_groups_that_are_made_anew_are_registered_anew(four_ranks):
    """They have the names of those before."""
    assert isinstance(four_ranks.run(stored, 2)[0], NodeGroups)
    four_ranks.regroup()
    assert four_ranks.run(forgotten) == [None] * 4
