"""The bytes a rank holds, of which plans take a share, are the same number on every rank."""

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.distributed import ParallelDims

from torchtitan_integration.parallelize import COPIES_OF_PARAMETERS, bytes_held


@pytest.mark.parametrize("rank", [0, 3])
def test_a_dimension_that_does_not_divide_counts_as_on_the_rank_with_most(rank):
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        weight = distribute_tensor(torch.zeros(5, 6), mesh, [Replicate(), Shard(0)])
        module = nn.ParameterList([nn.Parameter(weight), nn.Parameter(torch.zeros(7))])
        dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=2, pp=1, ep=1, etp=1, world_size=4)
        held = bytes_held(module, dims)
    finally:
        dist.destroy_process_group()
    assert held == COPIES_OF_PARAMETERS * 4 * (3 * 6 + 7) // 2
