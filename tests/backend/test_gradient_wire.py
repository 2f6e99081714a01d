"""`megamoe.gradient_wire` in `torch.compile`: gradients of weights sharded inside the graph."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from moe_compile.runtime.launch_records import executed_records
from moe_compile.testing.process_groups import rank_device
from tests.gradient_sums import check_rounded_once

WIDTH = 16
WIRE = {"megamoe.gradient_wire": "bf16_fp32_sum"}
FX = {"megamoe.codegen": "fx"}
COLLECTIVES = ("all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor")


class ShardedLinear(nn.Module):
    """A float32 weight in shards, gathered and cast in the graph, as simple FSDPs do."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        rows = WIDTH // dist.get_world_size(group)
        generator = torch.Generator().manual_seed(dist.get_rank(group))
        shard = torch.randn(rows, WIDTH, generator=generator) / 4
        self.shard = nn.Parameter(shard.to(rank_device()))

    def forward(self, x):
        weight = all_gather_tensor_autograd(self.shard, 0, self.group)
        return x @ weight.to(torch.bfloat16)


class AdaptedOnRankZero(ShardedLinear):
    """Rank 0 gathers the sum of its shard and a product: the graph computes with its gradient."""

    def forward(self, x):
        shard = self.shard
        if dist.get_rank(self.group) == 0:
            shard = shard + shard[:, :2] @ shard[:2]
        weight = all_gather_tensor_autograd(shard, 0, self.group)
        return x @ weight.to(torch.bfloat16)


def inputs(rank):
    torch.manual_seed(90 + rank)
    return torch.randn(8, WIDTH, dtype=torch.bfloat16).to(rank_device())


def gradient(kind, rank, options):
    """Return the shard's gradient, and the names of the collectives of the step that made it."""
    torch._dynamo.reset()
    torch._dynamo.config.capture_scalar_outputs = True
    layer = kind(dist.group.WORLD)
    run = torch.compile(layer, backend="megamoe", fullgraph=True, options=options)
    x = inputs(rank)
    run(x).float().square().sum().backward()  # compiles: tracing calls the operators too
    layer.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(x).float().square().sum().backward()
    names = [event.name.removeprefix("_c10d_functional::") for event in profile.events()]
    (shard,) = (p for name, p in layer.named_parameters() if name.endswith("shard"))
    return shard.grad, [name for name in names if name in COLLECTIVES]


def one_layer(rank, options):
    """Return this rank's gradient, and what every rank contributed to it."""
    ours, ran = gradient(ShardedLinear, rank, options)
    group = dist.group.WORLD
    weight = ShardedLinear(group)
    whole = all_gather_tensor_autograd(weight.shard, 0, group).detach().requires_grad_()
    (inputs(rank) @ whole.to(torch.bfloat16)).float().square().sum().backward()
    every = [torch.empty_like(whole) for _ in range(group.size())]
    dist.all_gather(every, whole.grad)
    return ours.cpu(), [g.chunk(group.size())[rank].cpu() for g in every], ran


@pytest.mark.parametrize("codegen", ["fx", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_graph_without_regions_gets_the_pass(two_devices, codegen):
    for ours, parts, ran in two_devices.run(one_layer, {**WIRE, "megamoe.codegen": codegen}):
        check_rounded_once(ours, parts)
        assert ran == ["all_gather_into_tensor", "all_to_all_single"]


def recorded(rank):
    gradient(ShardedLinear, rank, {**FX, **WIRE})
    launches = [(r["phase"], list(r["launches"].values())) for r in executed_records()]
    return [(phase, each[0][0]) for phase, each in launches if list(map(len, each)) == [1]]


def test_a_graph_without_regions_says_what_it_launches(two_ranks):
    """Ranks that decided differently waited for one another for ever, as nothing was compared."""
    for found in two_ranks.run(recorded):
        operators = [(phase, one.split("(")[0].rpartition("::")[2]) for phase, one in found]
        assert ("forward", "all_gather_into_tensor") in operators
        assert ("backward", "all_to_all_single") in operators


def adapted(rank):
    (plain, _), (ours, ran) = (
        gradient(AdaptedOnRankZero, rank, {**FX, **wire}) for wire in ({}, WIRE)
    )
    return torch.equal(ours, plain), ran


def test_ranks_of_which_one_computes_with_the_gradient_leave_it_as_it_is_on_all(two_ranks):
    """One sent an all-to-all, the other a reduce-scatter."""
    for is_same, ran in two_ranks.run(adapted):
        assert is_same and ran == ["all_gather_into_tensor", "reduce_scatter_tensor"]


def test_it_is_off_unless_asked(two_ranks):
    for _, _, ran in two_ranks.run(one_layer, FX):
        assert ran == ["all_gather_into_tensor", "reduce_scatter_tensor"]
