"""All plans of the block compute one function, and the compiler splits what it should."""

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

from benchmarks.link.block import replicated_names
from benchmarks.link.cases import BlockCase, Plan
from benchmarks.link.subjects import BlockSubjects
from benchmarks.link.variants import EXPERTS_ALONE
from benchmarks.link.whole_block import make_block

PLANS = [Plan(attention=a, experts=e) for a in ("tp", "sp") for e in ("tp", "a2a")]
PLANS.append(EXPERTS_ALONE)


def small(ranks, top_k=2, blocks=1):
    return BlockCase(
        name="small", num_ranks=ranks, tokens=12, batch=2, width=64, heads=8, kv_heads=4,
        experts=8, hidden=16, top_k=top_k, blocks=blocks,
    )  # fmt: skip


def subject(case, plan, dtype):
    return BlockSubjects(case, dist.group.WORLD, dtype).of(plan)


def step(subject, forward):
    """Return pairs (what one step computed, what the reference did)."""
    subject.tokens.grad = None
    subject.module.zero_grad()
    out = forward(subject.tokens)
    out.backward(subject.grad)
    for name, parameter in subject.module.named_parameters():
        if name in subject.replicated:
            dist.all_reduce(parameter.grad)
    ours = [out.detach(), subject.tokens.grad, *(p.grad for p in subject.module.parameters())]
    wanted = subject.expected
    return list(zip(ours, [wanted.out, wanted.input_grad, *wanted.weight_grads], strict=True))


def run_eagerly(rank, ranks, plan, top_k, blocks=1):
    """float32: torch's grouped GEMM takes nothing wider."""
    ours = subject(small(ranks, top_k, blocks), plan, torch.float32)
    return [(a.clone(), b) for a, b in step(ours, ours.module)]


def check(results, blocks=1):
    for pairs in results:
        assert len(pairs) == 2 + 10 * blocks
        for ours, wanted in pairs:
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p.attention}+{p.experts}")
def test_two_ranks_compute_what_one_would(two_ranks, plan):
    check(two_ranks.run(run_eagerly, 2, plan, 2))


def test_two_blocks_compute_what_one_rank_would(two_ranks):
    check(two_ranks.run(run_eagerly, 2, EXPERTS_ALONE, 2, 2), blocks=2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_fullest_rank_has_the_load_that_was_asked_for(ranks):
    case = BlockCase(
        name="load", num_ranks=ranks, tokens=512, batch=2 * ranks, width=64, experts=4 * ranks,
        rank_load=1.3,
    )  # fmt: skip
    whole = make_block(case, torch.float32)
    _, chosen = (whole.tokens @ whole.weights["router"]).topk(case.top_k, dim=-1)
    rows = torch.bincount(chosen.flatten(), minlength=case.experts).view(ranks, -1).sum(1)
    assert float(rows[0] / rows.float().mean()) == pytest.approx(1.3, rel=0.01)
    assert float(rows[1:].max() / rows[1:].min()) < 1.2


def test_attention_divided_by_heads_leaves_no_gradient_of_it_to_be_summed():
    assert "attention.k" in replicated_names(PLANS[2])
    assert not any(name.startswith("attention.") for name in replicated_names(PLANS[0]))
