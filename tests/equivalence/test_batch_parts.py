"""A graph in parts of its batch computes what the model computes of the parts, one after another.

Outputs, gradients of inputs and of parameters, and what is counted, bit for bit.
"""

import pytest
import torch
from torch.distributed.tensor import DTensor

from moe_compile.report.process_report import REPORT
from moe_compile.testing.rank_pool import RankFailure, RankPool
from passes.replay.batch_parts import part_sizes
from tests.batch_layers import (
    POSITIONS,
    WIDTH,
    Block,
    Ulysses,
)
from tests.dispatch_layers import InOrder, SharedByIndex, SharedInOrder, SharedInOrderWeighted
from tests.layers import GroupedExperts
from tests.sharded_blocks import GatheredSequence, Sharded


def drawn(rank, size, dtype):
    own = torch.Generator().manual_seed(100 + rank)
    x, gradient = torch.randn(2, size, POSITIONS, WIDTH, generator=own).to(dtype)
    return x, gradient


def state_of(model, x, y):
    yield "output", y.detach()
    yield "input gradient", x.grad
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        yield (
            f"gradient of {name}",
            gradient.to_local() if isinstance(gradient, DTensor) else gradient,
        )
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer


def accumulated(model, x, gradient, sizes):
    """Run `model` eagerly on one part after another, adding up gradients."""
    x = x.clone().requires_grad_()
    parts = []
    for part, its_gradient in zip(x.split(sizes), gradient.split(sizes), strict=True):
        parts.append(model(part))
        parts[-1].backward(its_gradient)
    return dict(state_of(model, x, torch.cat(parts)))


def run_case(rank, build, parts, size, options):
    """Return what differs from gradient accumulation, and what became of the graph's regions.

    `build` is a model's class, and the class of its experts.
    """
    torch._dynamo.reset()
    model, layer = build
    dtype = torch.bfloat16
    x, gradient = drawn(rank, size, dtype)
    expected = accumulated(model(layer, dtype), x, gradient, part_sizes(len(x), parts))
    compiled_model, given = model(layer, dtype), x.clone().requires_grad_()
    options = {"megamoe.batch_parts": parts, "megamoe.codegen": "fx", **options}
    first = len(REPORT.compilations)
    compiled = torch.compile(compiled_model, backend="megamoe", fullgraph=True, options=options)
    y = compiled(given)
    y.backward(gradient)
    found = dict(state_of(compiled_model, given, y))
    differing = [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
    (made,) = REPORT.compilations[first:]
    return differing, [(region.verdict, region.num_chunks) for region in made.regions]


def check(pool, model, layer, parts, size, *, chunks=1, **options):
    options = {"strict": True, "chunks": chunks, "equal_tokens": True, **options}
    settings = {f"megamoe.{name}": value for name, value in options.items()}
    found = pool.run(run_case, (model, layer), parts, size, settings)
    for rank, (differing, regions) in enumerate(found):
        assert not differing, f"rank {rank}: {differing}"
        assert len(regions) == parts
        assert {num for _, num in regions} == {chunks}


def test_two_parts_equal_gradient_accumulation(mirrored_ranks):
    check(mirrored_ranks, Block, InOrder, 2, 4)


@pytest.mark.slow
def test_attention_between_exchanges_runs_in_parts_and_groups_of_heads(two_ranks):
    check(two_ranks, Ulysses, GroupedExperts, 2, 4, attention_chunks=2)


SHARED = (SharedInOrderWeighted, SharedInOrder, SharedByIndex)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layer"),
    [(model, layer) for model in (Sharded, GatheredSequence) for layer in SHARED],
)
def test_ranks_that_share_sequences_share_out_the_tokens_of_a_part(two_ranks, model, layer):
    """Tensor parallelism with divided sequences: each rank routes half of the tokens of a part."""
    check(two_ranks, model, layer, 2, 4)


@pytest.mark.slow
def test_parts_that_differ_in_size_are_shared_out_each_by_itself(two_ranks):
    check(two_ranks, Sharded, SharedInOrderWeighted, 3, 5)


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
    assert (
        "on rank 0: the batch: the batch has too few sequences for this number of parts (1 for 2 "
        "parts)" in said
    )
    assert "DataLoader(drop_last=True)" in said
