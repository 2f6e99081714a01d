"""What a CPU rounds by position is refused where rows do not fill whole vectors."""

import pytest
import torch
import torch.nn.functional as F

from moe_compile.journal.reasons import Reason
from moe_compile.regions.regions import RowProof
from moe_compile.testing.cpu_rounding.position_rounding import (
    ALIGNED_BYTES,
    ALIKE_IN_FLOAT,
    differs_by_position,
)
from tests.layers import LoopExperts
from tests.proof.verdicts import judge

ROWS = (1, 2, 3, 5, 8, 13, 40)


def verdict_of(fake_ranks, hidden, dtype, activation=F.silu):
    class Activated(LoopExperts):
        def expert(self, x, e):
            return activation(x @ self.w1[e]) @ self.w2[e]

    x = torch.randn(32, 16, dtype=dtype, requires_grad=True)
    return judge(Activated(16, hidden, 8, 2, fake_ranks, dtype), x)


@pytest.mark.parametrize(("hidden", "dtype"), [(17, torch.float32), (24, torch.float32)])
def test_silu_in_rows_that_do_not_fill_vectors_is_refused(fake_ranks, hidden, dtype):
    """SiLU of the last elements differed in the last bit, and chunks end elsewhere."""
    verdict = verdict_of(fake_ranks, hidden, dtype)
    assert getattr(verdict, "reason", verdict) is Reason.MAY_ROUND, verdict


FITTING = {
    "silu in rows that fill vectors": (32, torch.float32, F.silu),
    "silu in bfloat16": (24, torch.bfloat16, F.silu),
    "relu": (48, torch.float32, F.relu),
    "tanh": (48, torch.float32, torch.tanh),
    "products of bfloat16": (17, torch.bfloat16, F.relu),
    "tanh gelu in bfloat16 that fills": (64, torch.bfloat16, F.gelu),
}


def vector_norm(power):
    return lambda x: x + torch.linalg.vector_norm(x, power, dim=-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_norm_of_another_power_is_refused(fake_ranks, dtype):
    verdict = verdict_of(fake_ranks, 32, dtype, vector_norm(2.5))
    assert getattr(verdict, "reason", verdict) is Reason.MAY_ROUND, verdict
    assert isinstance(verdict_of(fake_ranks, 32, dtype, vector_norm(3)), RowProof)


@pytest.mark.parametrize("case", FITTING)
def test_what_rounds_alike_in_every_row_is_proven(fake_ranks, case):
    verdict = verdict_of(fake_ranks, *FITTING[case])
    assert isinstance(verdict, RowProof), verdict


@pytest.mark.parametrize(
    ("hidden", "dtype"), [(17, torch.float32), (20, torch.float32), (10, torch.float64)]
)
def test_products_of_rows_that_begin_between_boundaries_are_refused(fake_ranks, hidden, dtype):
    """A gradient's product with weights had other last bits where its rows began elsewhere."""
    verdict = verdict_of(fake_ranks, hidden, dtype, F.relu)
    assert getattr(verdict, "reason", verdict) is Reason.MAY_ROUND, verdict
    assert "rows" in verdict.detail and "elements apart" in verdict.detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 33])
def test_products_of_rows_on_boundaries_round_alike_wherever_they_begin(dtype, num_rows):
    """In two bytes wherever rows begin at all."""
    draw = torch.Generator().manual_seed(num_rows)
    unit = ALIGNED_BYTES // dtype.itemsize if dtype.itemsize > 2 else 5
    for width, hidden in ((unit, 2 * unit), (3 * unit, unit), (8 * unit, 5 * unit)):
        weight = torch.randn(width, hidden, generator=draw).to(dtype)
        x = torch.randn(num_rows, width, generator=draw).to(dtype)
        gradient = torch.randn(num_rows, hidden, generator=draw).to(dtype)
        whole = products(x, gradient, weight)
        for before in range(1, 8):
            moved = (torch.cat([t[:1].expand(before, -1), t])[before:] for t in (x, gradient))
            for a, b in zip(whole, products(*moved, weight), strict=True):
                assert torch.equal(a, b)


def products(x, gradient, weight):
    return x @ weight, gradient @ weight.t(), x.t() @ gradient, F.linear(gradient, weight)


def test_gelu_in_bfloat16_rows_that_do_not_fill_vectors_is_refused(fake_ranks):
    verdict = verdict_of(fake_ranks, 24, torch.bfloat16, F.gelu)
    assert getattr(verdict, "reason", verdict) is Reason.MAY_ROUND, verdict


def test_a_variance_in_float64_is_refused(fake_ranks):
    """Of a single row it is computed by other code than of several."""
    verdict = verdict_of(fake_ranks, 32, torch.float64, lambda h: h - h.var(1, keepdim=True))
    assert getattr(verdict, "reason", verdict) is Reason.MAY_ROUND, verdict


def test_a_variance_in_bfloat16_is_proven(fake_ranks):
    verdict = verdict_of(fake_ranks, 32, torch.bfloat16, lambda h: h - h.var(1, keepdim=True))
    assert isinstance(verdict, RowProof), verdict


def with_body(fake_ranks, body, dtype=torch.float32, width=16):
    class Written(LoopExperts):
        def expert(self, x, e):
            return super().expert(body(x), e)

    x = torch.randn(32, width, dtype=dtype, requires_grad=True)
    return judge(Written(width, 64, 8, 2, fake_ranks, dtype), x)


def one_per_row(x):
    return x.amax(1, keepdim=True)


INNER = {
    "sum of columns": lambda x: x * x.t().contiguous().sum(0)[:, None],
    "mean of a stack": lambda x: torch.stack([x, x * 2, x * 3]).mean(0),
    "rows repeated outside": lambda x: (x.expand(7, -1, -1) * 2).permute(1, 0, 2)[:, 3],
    "rows broadcast outside": lambda x: (x * torch.ones(7, 1, 1)).permute(1, 0, 2)[:, 3],
    "a number per row repeated": lambda x: x * one_per_row(x).expand(-1, 16).sum(1, keepdim=True),
    "its magnitudes": lambda x: x * one_per_row(x).expand(-1, 16).abs().sum(1, keepdim=True),
    "a number per row added": lambda x: x * (x + one_per_row(x)).sum(1, keepdim=True),
    "and handed on": lambda x: x * (1 - (x - one_per_row(x)) * 0.5).mean(1, keepdim=True),
    "joined": lambda x: x * torch.cat([one_per_row(x).expand(-1, 48), x], 1).sum(1, keepdim=True),
    "stacked": lambda x: (
        x * torch.stack([one_per_row(x).expand(-1, 16), x], 1).sum((1, 2))[:, None]
    ),
    "copied in another shape": lambda x: (
        x * (x.view(-1, 4, 4).mT + one_per_row(x)[:, None]).reshape(-1, 16).sum(1, keepdim=True)
    ),
}


def with_body_on_all_rows(fake_ranks, body):
    class Written(LoopExperts):
        def experts(self, rows, received):
            return super().experts(body(rows), received)

    x = torch.randn(32, 16, requires_grad=True)
    return judge(Written(16, 64, 8, 2, fake_ranks, torch.float32), x)


@pytest.mark.parametrize("case", INNER)
def test_sums_that_run_over_several_rows_at_once_are_refused(fake_ranks, case):
    """Chunks have other last rows, which a CPU sums by other code: bits differed."""
    verdict = with_body_on_all_rows(fake_ranks, INNER[case])
    assert getattr(verdict, "reason", verdict) is Reason.MAY_ROUND, verdict


WITHIN_AN_EXPERT = (
    "sum of columns", "mean of a stack", "rows repeated outside", "rows broadcast outside"
)  # fmt: skip


@pytest.mark.parametrize("case", WITHIN_AN_EXPERT)
def test_sums_over_the_rows_of_one_expert_are_left_to_the_chunk_that_has_it(fake_ranks, case):
    """A chunk has all of an expert's rows, in memory of their own, or does not compute them."""
    proof = with_body(fake_ranks, INNER[case])
    assert isinstance(proof, RowProof), proof
    assert {expert for _, experts in proof.whole for expert in experts} == set(range(4))


def one_product_per_row(x):
    matrices = x.reshape(-1, 4, 4)
    return x * (matrices @ matrices).reshape(-1, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_of_each_row_by_itself_is_refused(fake_ranks, dtype):
    verdict = with_body(fake_ranks, one_product_per_row, dtype)
    assert getattr(verdict, "reason", verdict) is Reason.MAY_ROUND, verdict
    assert "bmm" in verdict.detail
    proven = with_body(fake_ranks, one_product_per_row, torch.bfloat16)
    assert isinstance(proven, RowProof), proven


@pytest.mark.parametrize(
    ("join", "fits"),
    [
        (lambda y: torch.cat([y, y[:, :1]], 1)[:, :16], False),
        (lambda y: torch.cat([y[:, :8], y], 1)[:, 8:], False),
        (lambda y: F.pad(y, (1, 15))[:, 1:17], False),
        (lambda y: torch.cat([y, y], 1)[:, :16], True),
        (lambda y: F.pad(y, (0, 16))[:, :16], True),
        (lambda y: torch.stack([y, y], 1)[:, 0], True),
    ],
)
def test_results_of_products_that_stand_in_longer_rows(fake_ranks, join, fits):
    """Their gradients are parts of longer rows; products of these round by where they begin."""

    class Joined(LoopExperts):
        def expert(self, x, e):
            return join(x @ self.w1[e])

    x = torch.randn(32, 16, requires_grad=True)
    verdict = judge(Joined(16, 16, 8, 2, fake_ranks, torch.float32), x)
    assert getattr(verdict, "reason", None) is (None if fits else Reason.MAY_ROUND)


def test_products_of_complex_numbers_are_refused(fake_ranks):
    class Squared(LoopExperts):
        def expert(self, x, e):
            return x * x

    x = torch.randn(32, 16, dtype=torch.complex64, requires_grad=True)
    verdict = judge(Squared(16, 16, 8, 2, fake_ranks, torch.complex64), x)
    assert getattr(verdict, "reason", verdict) is Reason.MAY_ROUND, verdict
    assert "complex" in verdict.detail


ROW_BY_ROW = {
    "mean of a stack": lambda x: torch.stack([x, x * 2, x * 3], 1).mean(1),
    "rows normed by hand": lambda x: x * x.square().mean(1, keepdim=True).rsqrt(),
    "rows centred": lambda x: (x - x.mean(1, keepdim=True)).square().sum(1, keepdim=True) + x,
    "one more dimension in front": lambda x: x[None].sum(0),
}


@pytest.mark.parametrize("case", ROW_BY_ROW)
def test_sums_of_each_row_by_itself_are_proven(fake_ranks, case):
    verdict = with_body(fake_ranks, ROW_BY_ROW[case])
    assert isinstance(verdict, RowProof), verdict


def test_threads_share_rows_at_whole_vectors_only(fake_ranks):
    torch.set_num_threads(3)
    try:
        narrow = verdict_of(fake_ranks, 32, torch.float32)
        wide = verdict_of(fake_ranks, 192, torch.float32)
    finally:
        torch.set_num_threads(1)
    assert getattr(narrow, "reason", narrow) is Reason.MAY_ROUND, narrow
    assert isinstance(wide, RowProof), wide


def test_the_probe_tells_silu_from_rsqrt_in_bfloat16():
    assert not differs_by_position(F.silu, torch.bfloat16)
    assert differs_by_position(torch.rsqrt, torch.bfloat16)


def by_position(run, x, gradient):
    """Return forward and gradient in whole vectors, and one by one."""
    found = []
    for spread in (lambda t: t, lambda t: torch.stack([t, t], -1)[..., 0]):
        leaf = spread(x).detach().requires_grad_()
        y = run(leaf)
        found.append([y.detach(), *torch.autograd.grad(y, leaf, spread(gradient))])
    return found


EXACT = {
    "neg": torch.neg, "abs": torch.abs, "mul": lambda x: x * 1.7, "div": lambda x: x / 1.7,
    "add": lambda x: x + 0.3, "reciprocal": torch.reciprocal, "square": torch.square,
    "cube": lambda x: x**3, "sqrt": lambda x: x.abs().sqrt(), "relu": F.relu,
    "leaky_relu": F.leaky_relu, "clamp": lambda x: x.clamp(-1, 1), "hardtanh": F.hardtanh,
    **{n: (lambda x, n=n: getattr(torch, n)(x.abs())) for n in sorted(ALIKE_IN_FLOAT)},
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operators_called_exact_round_alike_at_every_position(name, dtype):
    draw = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(1 << 18, generator=draw, dtype=dtype) * s for s in (3, 1))
    whole, single = by_position(EXACT[name], x, gradient)
    for a, b in zip(whole, single, strict=True):
        assert torch.equal(a, b)


WITHIN = {
    "sum": lambda x: x.sum(-1), "mean": lambda x: x.mean(-1), "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms norm": lambda x: F.rms_norm(x, x.shape[-1:]), "logsumexp": lambda x: x.logsumexp(-1),
    "sum over heads": lambda x: x.unflatten(-1, (-1, 5)).sum(1), "cumsum": lambda x: x.cumsum(-1),
    "small products": lambda x: (m := x.unflatten(-1, (-1, 5))) @ m.transpose(1, 2),
}  # fmt: skip


@pytest.mark.parametrize("case", WITHIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_thread_computes_each_row_by_itself(case, dtype):
    for width in (5, 20, 35, 160):
        x = torch.randn(max(ROWS), width).to(dtype)
        run = WITHIN[case]
        expected = run(x)
        for rows in ROWS:
            assert torch.equal(run(x[:rows]), expected[:rows]), (rows, width)
            assert torch.equal(run(x[-rows:]), expected[-rows:]), (rows, width)
