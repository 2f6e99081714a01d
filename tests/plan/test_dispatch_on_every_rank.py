"""Every rank of a group decides the dispatch alike."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_compile.hardware import load_profile
from passes.pipeline import DYNAMO, run_level
from tests.capture import dynamo_graphs, state
from tests.layers import GroupedExperts

RANKS = 8


def decided(rank):
    """Return the decision and what became of it on one of eight ranks that do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    layer = GroupedExperts(256, 64, 2 * RANKS, 2 * RANKS, dist.group.WORLD)
    x = torch.randn(16384, 256, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(layer, x)
    ours = state(equal_tokens=True, dispatch="auto", numerics="bounded", max_memory_increase=10.0)
    ours.hardware = load_profile("h800")
    run_level(DYNAMO, gm.graph, ours)
    dist.destroy_process_group()
    (plan,) = ours.experts
    return plan.decision, plan.plan.gathers, plan.plan.num_chunks


@pytest.mark.usefixtures("no_group_stays")
def test_ranks_decide_alike_and_gather():
    """Twice as many experts a token as ranks: an all-to-all sends twice as much."""
    first, *others = [decided(rank) for rank in (0, 3, RANKS - 1)]
    assert others == [first, first]
    assert first[0].gathers and first[1:] == (True, 1)
