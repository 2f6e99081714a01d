"""Gradients that travel as bfloat16, on a GPU: memory, and the stream that everything runs on."""

import pytest
import torch
import torch.distributed as dist

from moe_compile.ops.rounded_sum import STAGED
from torchtitan_integration.fsdp import RoundedReduceScatter

SLACK_BYTES = 1 << 20
"""What the allocator may round up, and torch's reduction may use between blocks."""
LENGTH = 1 << 22


def buffers(ranks, device):
    comm, settings = RoundedReduceScatter(), {"dtype": torch.float32, "device": device}
    return comm, comm.allocate((ranks * LENGTH,), **settings), comm.allocate((LENGTH,), **settings)


@pytest.mark.gpu
def test_no_memory_is_taken_but_for_the_staged_values(fake_ranks):
    """The ranks do not exist: what is received is whatever the buffer holds."""
    comm, whole, output = buffers(fake_ranks.size(), torch.device("cuda"))
    whole.zero_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    comm(output, whole, fake_ranks, dist.ReduceOp.SUM)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 2 * STAGED + SLACK_BYTES


@pytest.mark.gpu
def test_all_of_it_runs_on_the_stream_that_calls(no_group_stays):
    """The buffer is filled on that stream, late: rounding anywhere else would read too early."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    torch.cuda.set_device(0)
    values = torch.randn(LENGTH, device="cuda")
    comm, whole, output = buffers(1, values.device)
    for tensor in (whole, output):
        tensor.zero_()
    comm(output, whole, dist.group.WORLD, dist.ReduceOp.SUM)  # the communicator is set up
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # cycles, some 50 ms
        whole.copy_(values)
        comm(output, whole, dist.group.WORLD, dist.ReduceOp.SUM)
        done = stream.record_event()
    assert not done.query()
    done.synchronize()
    assert torch.equal(output, values.to(torch.bfloat16).float())
