"""Elements that each rank sends, forward and backward, are exactly those of the formulas.

b sequences of length s, width h, n ranks, m query heads per KV head, k experts per token. The unit,
2 b s h (n - 1) / n, is what tensor parallelism sends in one direction of training.
"""

from fractions import Fraction

import pytest
import torch
import torch._dynamo

from benchmarks.link.block import (
    SequenceParallelAttention,
    TensorParallelAttention,
    TensorParallelExperts,
)
from benchmarks.link.cases import BlockCase
from benchmarks.link.layer import MoELayer
from tests.alike_ranks import alike_ranks
from tests.slow_parameters import slow_but

BATCH, WIDTH, EXPERTS, TOKENS = 2, 64, 8, 16
RANKS, SHARED, TOP_K = (2, 4, 8), (1, 4, 8), range(1, 9)


def case_of(ranks, *, top_k=2, heads=64, shared=1):
    return BlockCase(
        name="counted", num_ranks=ranks, tokens=TOKENS, batch=BATCH, width=WIDTH, hidden=64,
        experts=EXPERTS, top_k=top_k, heads=heads, kv_heads=heads // shared,
    )  # fmt: skip


def unit_of(ranks):
    return Fraction(2 * TOKENS * ranks * WIDTH * (ranks - 1), ranks)


def filled(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def sent_both_ways(group, module, x):
    """Return what was sent in the forward, and in the backward."""
    x.requires_grad_()
    group.log.clear()
    out = module(x)
    forward = list(group.log)
    group.log.clear()
    out.backward(torch.ones_like(out))
    return forward, list(group.log)


def elements(log):
    return sum(sent.elements for sent in log if sent.dtype is torch.float32)


def is_rows(sent):
    return len(sent.shape) == 2 and sent.shape[1] == WIDTH


def sequence_first(ranks):
    return torch.randn(TOKENS // BATCH, BATCH, WIDTH)


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("ranks", RANKS)
def test_attention_by_heads_sends_one_unit(ranks, shared):
    with alike_ranks(ranks) as group:
        attention = filled(TensorParallelAttention(case_of(ranks, shared=shared), group))
        ways = sent_both_ways(group, attention, sequence_first(ranks))
    for log in ways:
        assert elements(log) == unit_of(ranks)
        assert sorted(sent.kind for sent in log) == ["all_gather", "reduce_scatter"]


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("ranks", RANKS)
def test_attention_by_sequence_sends_one_and_a_share_over_the_ranks(ranks, shared):
    with alike_ranks(ranks) as group:
        attention = filled(SequenceParallelAttention(case_of(ranks, shared=shared), group))
        ways = sent_both_ways(group, attention, sequence_first(ranks))
    for log in ways:
        assert elements(log) == unit_of(ranks) * (1 + Fraction(1, shared)) / ranks
        assert [sent.kind for sent in log] == ["all_to_all"] * 4


def balanced_tokens(top_k):
    """Tokens that a router of unit vectors sends to all experts alike."""
    x = torch.zeros(TOKENS, WIDTH)
    for token in range(TOKENS):
        for choice in range(top_k):
            x[token, (token * top_k + choice) % EXPERTS] = 8.0 + choice
    return x


def with_balanced_router(module):
    filled(module)
    module.router.data = torch.eye(WIDTH, EXPERTS)
    for name in ("gate", "up", "down"):
        setattr(module, name, torch.nn.Parameter(getattr(module, name).float()))
    return module


@pytest.mark.parametrize("top_k", TOP_K)
@pytest.mark.parametrize("ranks", RANKS)
def test_exchanged_rows_are_k_over_n(ranks, top_k):
    with alike_ranks(ranks) as group:
        experts = with_balanced_router(MoELayer(case_of(ranks, top_k=top_k), group))
        forward, backward = sent_both_ways(group, experts, balanced_tokens(top_k))
    assert elements(forward) == elements(backward) == unit_of(ranks) * Fraction(top_k, ranks)
    metadata = [sent for sent in forward if sent.dtype is torch.int64]
    assert [sent.elements for sent in metadata] == [EXPERTS * (ranks - 1) // ranks]


@pytest.mark.parametrize("top_k", TOP_K)
@pytest.mark.parametrize("ranks", RANKS)
def test_sliced_experts_send_one_unit_whatever_k(ranks, top_k):
    with alike_ranks(ranks) as group:
        experts = with_balanced_router(TensorParallelExperts(case_of(ranks, top_k=top_k), group))
        ways = sent_both_ways(group, experts, balanced_tokens(top_k))
    for log in ways:
        assert elements(log) == unit_of(ranks)
        assert {sent.dtype for sent in log} == {torch.float32}


def bfloat16_experts(case, group):
    """Compiled, torch's grouped GEMM takes nothing wider."""
    experts = with_balanced_router(MoELayer(case, group)).bfloat16()
    experts.router.data = experts.router.data.float()
    return experts


def send_gathered(ranks, top_k):
    torch._dynamo.reset()
    options = {
        "megamoe.codegen": "fx",
        "megamoe.dispatch": "all_gather",
        "megamoe.equal_tokens": True,
    }
    with alike_ranks(ranks) as group:
        experts = bfloat16_experts(case_of(ranks, top_k=top_k), group)
        compiled = torch.compile(experts, backend="megamoe", fullgraph=True, options=options)
        return sent_both_ways(group, compiled, balanced_tokens(top_k).bfloat16())


EVERY = [(ranks, top_k) for ranks in RANKS for top_k in TOP_K]


@pytest.mark.parametrize(("ranks", "top_k"), slow_but([(2, 1)], EVERY))
def test_gathered_tokens_are_one_unit_whatever_k(ranks, top_k):
    """One unit; where each row goes and its weight go with it, and the weight's gradient back."""
    ways = send_gathered(ranks, top_k)
    others, per_expert, per_row, per_gradient = ranks - 1, 4, 4 + 2, 2
    routing = (TOKENS * top_k * per_row + EXPERTS * per_expert) * others
    for log, metadata in zip(ways, (routing, TOKENS * top_k * per_gradient * others), strict=True):
        assert sum(sent.elements for sent in log if is_rows(sent)) == unit_of(ranks)
        assert not [sent for sent in log if sent.kind == "all_to_all"]
        assert sum(sent.bytes for sent in log if not is_rows(sent)) <= metadata
