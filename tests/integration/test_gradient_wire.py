"""FSDP2 with gradients that travel as bfloat16: values, division, HSDP, bytes and memory."""

import functools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from moe_compile.ops.rounded_sum import STAGED
from tests.gradient_sums import check_rounded_once, contribution
from torchtitan_integration.fsdp import RoundedReduceScatter, round_gradients

SCALES = {"sum": lambda n: 1.0, "avg": lambda n: 1.0 / n, "half": lambda n: 0.5}


def operation(name):
    if name == "half":
        return dist._make_nccl_premul_sum(0.5)  # PREMUL_SUM(0.5) in newer torch
    return {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}[name]


@functools.cache
def first_ranks(number):
    return dist.new_group(list(range(number)))


def reduce(rank, ranks, length, op, is_async, seed):
    """Return this rank's result, and every rank's contribution to it; None outside the group."""
    group = first_ranks(ranks)  # every process makes it
    if rank >= ranks:
        return None
    comm = RoundedReduceScatter()
    whole = comm.allocate((ranks * length,), dtype=torch.float32, device=torch.device("cpu"))
    output = comm.allocate((length,), dtype=torch.float32, device=torch.device("cpu"))
    whole.copy_(contribution(rank, (ranks * length,), seed))
    work = comm(output, whole, group, operation(op), async_op=is_async)
    if is_async:
        assert not work.is_completed()
        assert work.wait() and work.wait() and work.is_completed()
    else:
        assert work is None
    parts = [contribution(r, (ranks * length,), seed).chunk(ranks)[rank] for r in range(ranks)]
    return output, parts


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.sampled_from([2, 3, 4]),
    length=st.integers(1, 50),
    op=st.sampled_from(sorted(SCALES)),
    is_async=st.booleans(),
    seed=st.integers(0, 999),
)
def test_every_contribution_is_rounded_once(four_ranks, ranks, length, op, is_async, seed):
    for result in four_ranks.run(reduce, ranks, length, op, is_async, seed)[:ranks]:
        check_rounded_once(*result, SCALES[op](ranks))


class Carried(TorchDispatchMode):
    """Bytes that this rank puts into each collective of gradients, by torch's name of it."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("c10d::")
        if name in ("alltoall_base_", "_reduce_scatter_base_", "allreduce_"):
            sent = args[0][0] if name == "allreduce_" else args[1]
            self.bytes[name] = self.bytes.get(name, 0) + sent.nbytes
        return func(*args, **(kwargs or {}))


def reduce_doubles(rank):
    mine, output = torch.full((8,), 1.0 + 2.0**-40, dtype=torch.float64), torch.empty(2).double()
    with Carried() as carried:
        RoundedReduceScatter()(output, mine, dist.group.WORLD, dist.ReduceOp.SUM)
    return output.tolist(), carried.bytes


def test_another_type_than_float32_goes_torchs_way(four_ranks):
    exact = [4.0 + 2.0**-38] * 2
    assert four_ranks.run(reduce_doubles) == [(exact, {"_reduce_scatter_base_": 64})] * 4


class Small(nn.Module):
    """Sizes that neither two nor four ranks divide: FSDP2 pads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def backward(model, rank, step):
    torch.manual_seed(10 * rank + step)
    model(torch.randn(6, 5)).square().sum().backward()


def shard(mesh_shape, is_rounded, factor, forces_sum):
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = Small()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in (model.second, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_force_sum_reduction_for_comms(forces_sum)
        if factor is not None:
            module.set_gradient_divide_factor(factor)
    if is_rounded:
        round_gradients(model)
    return model


def train(rank, mesh_shape, steps, is_rounded=True, factor=None, forces_sum=True):
    """Return gradients over `steps` passes, each rank's own, and the bytes of the last pass."""
    ranks = dist.get_world_size()
    model = shard(mesh_shape, is_rounded, factor, forces_sum)
    for step in range(steps):
        model.set_requires_gradient_sync(step == steps - 1)
        with Carried() as carried:
            backward(model, rank, step)
    every = []
    for other in range(ranks):
        alone = Small()
        for step in range(steps):
            backward(alone, other, step)
        every.append([p.grad for p in alone.parameters()])
    whole = [p.grad.full_tensor() for p in model.parameters()]
    return whole, every, carried.bytes


def check_gradients(results, scale):
    for whole, every, _ in results:
        for i, gradient in enumerate(whole):
            check_rounded_once(gradient, [parts[i] for parts in every], scale)


@pytest.mark.parametrize("forces_sum", [True, False])
@pytest.mark.parametrize(("factor", "scale"), [(None, 0.25), (1.0, 1.0), (4.0, 0.25), (3.0, 1 / 3)])
def test_gradients_are_divided_as_fsdp_asks(four_ranks, factor, scale, forces_sum):
    """FSDP2 asks for a sum, a mean or a scaled sum, by its settings."""
    check_gradients(four_ranks.run(train, (4,), 1, True, factor, forces_sum), scale)


@pytest.mark.parametrize(("factor", "scale"), [(None, 0.25), (1.0, 1.0)])
def test_with_hsdp_the_sum_over_replicas_is_float32(four_ranks, factor, scale):
    results = four_ranks.run(train, (2, 2), 1, True, factor)
    check_gradients(results, scale)
    for _, _, carried in results:
        assert carried["allreduce_"] == carried["alltoall_base_"]  # a half of the values, float32


def test_what_is_accumulated_over_passes_is_rounded_once_at_the_end(four_ranks):
    check_gradients(four_ranks.run(train, (4,), 3), 0.25)


def test_half_the_bytes_travel(four_ranks):
    theirs = four_ranks.run(train, (4,), 1, False)
    ours = four_ranks.run(train, (4,), 1)
    for (_, _, before), (_, _, now) in zip(theirs, ours, strict=True):
        assert set(before) == {"_reduce_scatter_base_"} and set(now) == {"alltoall_base_"}
        assert 2 * now["alltoall_base_"] == before["_reduce_scatter_base_"] > 0


def peak_bytes(run):
    """Return the most memory that torch's allocator held at once during `run`, above the start."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    changes = [e for e in events if e.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak


def peak_of_reduction(rank, length):
    """Return the peak of buffers and reduction together, and of the buffers alone."""
    ranks, group = dist.get_world_size(), dist.group.WORLD

    def run(reduces):
        comm = RoundedReduceScatter()
        settings = {"dtype": torch.float32, "device": torch.device("cpu")}
        whole, output = comm.allocate((ranks * length,), **settings), None
        whole.zero_()
        output = comm.allocate((length,), **settings)
        if reduces:
            comm(output, whole, group, dist.ReduceOp.SUM)

    return peak_bytes(lambda: run(True)), peak_bytes(lambda: run(False))


def test_memory_is_that_of_the_buffers_one_more_output_and_the_staged_values(four_ranks):
    length = 300_000
    for with_reduction, buffers in four_ranks.run(peak_of_reduction, length):
        assert buffers == 4 * 5 * length
        assert with_reduction <= buffers + 4 * length + 2 * STAGED + 4096
