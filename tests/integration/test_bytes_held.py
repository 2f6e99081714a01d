"""The bytes a rank holds, of which plans take a share: of parameters, and of NCCL."""

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.distributed import ParallelDims

from moe_compile.config import MegaMoEConfig
from torchtitan_integration.meshes import buffers_of, exchange_buffers
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


def test_experts_are_sharded_over_the_ranks_that_have_the_same_ones():
    """They counted as sharded over all ranks: with EP 2 as half, with EP 8 as an eighth."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))["ep"]
        experts = nn.Parameter(distribute_tensor(torch.zeros(8, 6), mesh, [Shard(0)]))
        module = nn.ParameterList([experts, nn.Parameter(torch.zeros(12))])
        dims = ParallelDims(dp_replicate=1, dp_shard=4, cp=1, tp=1, pp=1, ep=2, etp=1, world_size=4)
        held = bytes_held(module, dims)
    finally:
        dist.destroy_process_group()
    assert held == COPIES_OF_PARAMETERS * 4 * (8 * 6 // 2 // 2 + 12 // 4)


def test_nccl_has_buffers_for_each_rank_of_the_machine_and_for_all_others_together():
    """3.28 GB of eight H100s, as others measured it."""
    assert buffers_of(range(8), 3, 8) / 1e9 == pytest.approx(3.28)
    assert buffers_of(range(64), 9, 8) == buffers_of(range(8), 0, 8) + 2**29
    assert buffers_of([1, 9, 17], 9, 8) == 2**29
    assert buffers_of(range(8, 12), 9, 8) == pytest.approx(3 * buffers_of([8, 9], 9, 8))
    assert buffers_of(range(8), 3, 8, 16) / 1e9 == pytest.approx(1.64)


@pytest.mark.parametrize(("hardware", "counted"), [("h100", 3.28e9 / 7 * 3 + 2**29), ("cpu", 0)])
def test_buffers_of_experts_on_two_machines_count_as_held(monkeypatch, hardware, counted):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    try:
        dims = ParallelDims(dp_replicate=1, dp_shard=8, cp=1, tp=1, pp=1, ep=8, etp=1, world_size=8)
        found = exchange_buffers(dims, MegaMoEConfig(hardware=hardware))
    finally:
        dist.destroy_process_group()
    assert found == pytest.approx(counted)
