"""All plans of the block compute one function, and the compiler splits what it should."""

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

from benchmarks.link.block import replicated_names
from benchmarks.link.cases import BlockCase, Plan
from benchmarks.link.subjects import BlockSubjects
from benchmarks.link.variants import EXPERTS_ALONE, named_variants
from benchmarks.link.whole_block import make_block
from moe_compile.report.process_report import REPORT

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


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("plan", PLANS[::3], ids=lambda p: f"{p.attention}+{p.experts}")
def test_four_ranks_compute_what_one_would(four_ranks, plan, top_k):
    check(four_ranks.run(run_eagerly, 4, plan, top_k))


def run_split(rank, plan):
    torch._dynamo.reset()
    """bfloat16: compiled, torch's grouped GEMM takes nothing else."""
    ours = subject(small(2), plan, torch.bfloat16)
    options = {
        "megamoe.codegen": "fx",
        "megamoe.chunks": 2,
        "megamoe.attention_chunks": 2,
        "megamoe.strict": True,
    }
    compiled = torch.compile(ours.module, backend="megamoe", fullgraph=True, options=options)
    split = [a.clone() for a, _ in step(ours, compiled)]
    eager = [a.clone() for a, _ in step(ours, ours.module)]
    made = REPORT.compilations[-1]
    chunks = [a.num_chunks for a in made.attention], [r.num_chunks for r in made.regions]
    return [torch.equal(a, b) for a, b in zip(split, eager, strict=True)], chunks


@pytest.mark.slow
def test_attention_and_experts_of_one_graph_are_split_and_no_bit_changes(two_ranks):
    for same, chunks in two_ranks.run(run_split, Plan(attention="sp", experts="a2a")):
        assert all(same) and chunks == ([2], [2])


def run_gathered(rank, plan):
    """Return the relative errors against the reference, and what the report remarks."""
    torch._dynamo.reset()
    ours = subject(small(2), plan, torch.bfloat16)
    (variant,) = named_variants((f"{plan.attention}+ag/rs N=2",))
    options = {**variant.options, "megamoe.codegen": "fx", "megamoe.strict": True}
    compiled = torch.compile(ours.module, backend="megamoe", fullgraph=True, options=options)
    pairs = step(ours, compiled)
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in pairs]
    (region,) = REPORT.compilations[-1].regions
    return errors, " ".join(region.remarks)


@pytest.mark.slow
def test_a_gathered_dispatch_in_halves_computes_the_same(two_ranks):
    for errors, remarks in two_ranks.run(run_gathered, Plan(attention="sp", experts="a2a")):
        assert max(errors) < 0.02 and "chunks of tokens" in remarks


def test_attention_divided_by_heads_leaves_no_gradient_of_it_to_be_summed():
    assert "attention.k" in replicated_names(PLANS[2])
    assert not any(name.startswith("attention.") for name in replicated_names(PLANS[0]))


def test_a_block_that_ranks_cannot_divide_is_refused():
    with pytest.raises(ValueError, match="kv_heads"):
        small(3)
