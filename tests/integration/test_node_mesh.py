"""A torchtitan job registers which ranks of an expert-parallel group share a node."""

import os
from unittest import mock

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from moe_compile.config import MegaMoEConfig
from moe_compile.errors import InvalidConfig
from moe_compile.journal.reasons import Reason
from moe_compile.runtime.node_groups import node_groups_of
from moe_compile.testing.rank_pool import RankFailure
from tests.integration.titan_jobs import OURS, STOCK, train
from torchtitan_integration.meshes import connect_exchanges, expert_mesh, node_shape, register_nodes


@pytest.mark.parametrize(
    ("ep", "etp", "of_node", "expected"),
    [(8, 1, 4, (2, 4)), (8, 2, 4, (4, 2)), (8, 1, 8, (1, 8)), (2, 2, 8, (1, 2)), (4, 1, 1, (4, 1))],
)
def test_nodes_of_a_group(ep, etp, of_node, expected):
    assert node_shape(ep, etp, of_node) == expected


@pytest.mark.parametrize(("ep", "etp", "of_node"), [(8, 1, 3), (4, 2, 1), (8, 1, 12), (3, 1, 2)])
def test_nodes_that_do_not_divide_a_group_are_refused(ep, etp, of_node):
    with pytest.raises(InvalidConfig, match="choose degrees that fit, or set"):
        node_shape(ep, etp, of_node)


def registered(rank, degrees, node_ranks, local_world_size):
    """Return the nodes as registered on a rank, or why nothing is; groups by their ranks."""
    settings = {"dp_replicate": 1, "cp": 1, "tp": 1, "pp": 1, "etp": 1, **degrees}
    dims = ParallelDims(**settings, world_size=4)
    dims.build_mesh()
    told = local_world_size[rank % len(local_world_size)]
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": told}):
        try:
            register_nodes(dims, MegaMoEConfig(nodes="exact", node_ranks=node_ranks))
        except InvalidConfig as error:
            return str(error)
    name = expert_mesh(dims, ["ep"]).get_group().group_name
    found = node_groups_of(name)
    groups = [dist.distributed_c10d._resolve_process_group(n) for n in (found.node, found.cross)]
    assert name not in (found.node, found.cross)
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    return found.num_nodes, found.num_local, found.place, *ranks


ALL_OVER = {"dp_shard": 4, "ep": 4}


def run(pool, *settings):
    pool.regroup()
    return pool.run(registered, *settings)


PLACES = {
    "one group on two nodes": (
        ALL_OVER,
        2,
        [
            (2, 2, 0, [0, 1], [0, 2]),
            (2, 2, 1, [0, 1], [1, 3]),
            (2, 2, 0, [2, 3], [0, 2]),
            (2, 2, 1, [2, 3], [1, 3]),
        ],
    ),
    "groups that are on a node each, as the machine says": (
        {"dp_shard": 4, "ep": 2},
        0,
        [(1, 2, rank % 2, [rank // 2 * 2, rank // 2 * 2 + 1], [rank]) for rank in range(4)],
    ),
    "of a node one rank is in each group": (
        {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2},
        2,
        [(2, 1, 0, [rank], [rank % 2, rank % 2 + 2]) for rank in range(4)],
    ),
}
"""Degrees and ranks of a node -> what every rank of four has registered."""


@pytest.mark.parametrize("name", PLACES)
def test_every_rank_registers_the_nodes_of_its_group(four_ranks, name):
    degrees, node_ranks, expected = PLACES[name]
    assert run(four_ranks, degrees, node_ranks, ("4",)) == expected


@pytest.mark.parametrize(
    ("node_ranks", "local_world_size", "said"),
    [
        (3, ("4",), "nodes of 3 ranks neither divide nor contain the 4 ranks that share"),
        (0, ("2",), "ranks 0 and 2 are on two nodes, on the hosts"),
        (0, ("2", "4"), "LOCAL_WORLD_SIZE is '2', '4'"),
        (0, ("",), "start the job by torchrun"),
    ],
)
def test_all_ranks_refuse_what_does_not_fit(four_ranks, node_ranks, local_world_size, said):
    found = run(four_ranks, ALL_OVER, node_ranks, local_world_size)
    assert all(said in message for message in found) and len(set(found)) == 1, found


def connected(rank):
    """Return the ranks of the groups that a rank sends numbers on, told twice to connect."""
    dims = ParallelDims(dp_replicate=1, cp=1, tp=1, pp=1, etp=1, world_size=4, **ALL_OVER)
    dims.build_mesh()
    register_nodes(dims, MegaMoEConfig(nodes="exact", node_ranks=2))
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent:
        connect_exchanges(dims)
        connect_exchanges(dims)
    return [dist.get_process_group_ranks(call.kwargs["group"]) for call in sent.call_args_list]


def test_every_group_that_rows_travel_on_is_connected_once_before_a_step(four_ranks):
    four_ranks.regroup()
    found = four_ranks.run(connected)
    nodes, across = ([0, 1], [0, 1], [2, 3], [2, 3]), ([0, 2], [1, 3], [0, 2], [1, 3])
    assert found == [[[0, 1, 2, 3], *groups] for groups in zip(nodes, across, strict=True)]


@pytest.mark.slow
def test_a_job_that_asks_for_two_hops_has_its_nodes_registered(four_ranks, tmp_path):
    """Losses are torchtitan's own, whether or not its way of counting is one that two hops take."""
    degrees = {"parallelism.expert_parallel_degree": 4}
    asked = {"megamoe.nodes": "exact", "megamoe.node_ranks": 2, "megamoe.strict": False}
    ours = train(four_ranks, 4, tmp_path / "ours", OURS, degrees, asked)
    theirs = train(four_ranks, 4, tmp_path / "theirs", STOCK, degrees)
    assert [rank.steps for rank in ours] == [rank.steps for rank in theirs]
    for rank in ours:
        assert rank.verdicts and not any(Reason.NO_NODE_GROUPS.value in r for r in rank.remarks)
    with pytest.raises(RankFailure, match="nodes of 3 ranks neither divide nor contain"):
        train(four_ranks, 4, tmp_path / "odd", OURS, degrees, {**asked, "megamoe.node_ranks": 3})
