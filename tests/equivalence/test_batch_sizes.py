"""A batch whose size is a symbol runs in parts, as one of a number does: bit for bit accumulation.

Steps of several sizes, on ranks that may have unequal ones, by programs compiled for any size.
"""

import pytest
import torch

from moe_compile.report.process_report import REPORT
from moe_compile.testing.rank_pool import RankFailure, RankPool
from passes.replay.batch_parts import part_sizes
from tests.batch_layers import Block
from tests.equivalence.test_batch_parts import accumulated, drawn, state_of
from tests.layers import GroupedExperts


def run_steps(rank, parts, sizes):
    """Return what differs from accumulation, by step, and regions of each program compiled."""
    torch._dynamo.reset()
    dtype = torch.bfloat16
    eager, compiled_model = (Block(GroupedExperts, dtype) for _ in range(2))
    options = {"batch_parts": parts, "codegen": "fx", "strict": True, "chunks": 1}
    options = {f"megamoe.{name}": value for name, value in options.items()}
    first = len(REPORT.compilations)
    compiled = torch.compile(compiled_model, backend="megamoe", fullgraph=True, options=options)
    differing = []
    for step, size in enumerate(sizes[rank]):
        x, gradient = (t.roll(step, -1) for t in drawn(rank, size, dtype))
        given = x.clone().requires_grad_()
        for one in (eager, compiled_model):
            one.zero_grad()
        expected = accumulated(eager, x, gradient, part_sizes(size, parts))
        y = compiled(given)
        y.backward(gradient)
        found = dict(state_of(compiled_model, given, y))
        names = (name for name, tensor in found.items() if not torch.equal(tensor, expected[name]))
        differing += [(step, name) for name in names]
    return differing, [len(made.regions) for made in REPORT.compilations[first:]]


@pytest.mark.slow
def test_ranks_have_other_sizes_and_compile_in_other_steps(two_ranks):
    sizes = [(4, 4, 7, 3), (4, 5, 2, 8)]
    for rank, (differing, regions) in enumerate(two_ranks.run(run_steps, 2, sizes)):
        assert not differing, f"rank {rank}: {differing}"
        assert {*regions} == {2}


def run_batches(rank, sizes):
    model = Block(GroupedExperts, torch.bfloat16)
    options = {"megamoe.batch_parts": 2, "megamoe.chunks": 1, "megamoe.codegen": "fx"}
    compiled = torch.compile(model, backend="megamoe", fullgraph=True, options=options)
    for size in sizes[rank]:
        x, gradient = drawn(rank, size, torch.bfloat16)
        compiled(x).backward(gradient)


@pytest.mark.slow
def test_a_last_batch_too_small_for_parts_on_one_rank_is_named_with_what_to_do():
    """Others run what was agreed and ask nobody, so that it cannot run whole on all ranks."""
    with RankPool(2, timeout_s=180) as pool, pytest.raises(RankFailure) as failure:
        pool.run(run_batches, [(4, 1), (4, 4)])
    said = " ".join(str(failure.value).split())
    assert "on rank 0: the batch: the batch has fewer sequences than parts (1 for 2 parts)" in said
    assert "DataLoader(drop_last=True)" in said
