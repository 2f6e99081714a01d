"""Rows are judged as they lie in memory, and in the types they have when they run."""

import pytest
import torch
import torch.nn.functional as F

from moe_compile.graph.query import tensor_of
from moe_compile.journal.reasons import Reason
from moe_compile.regions.regions import RowProof
from moe_compile.testing.cpu_rounding.position_rounding import LIE_APART
from tests.layers import LoopExperts
from tests.proof.verdicts import judge
from tests.slow_parameters import slow_but
from tests.testing.cpu_rounding.test_position_rounding import verdict_of, with_body

HALVES = {
    "gelu": lambda h: F.gelu(h[:, :64]) * h[:, 64:],
    "gelu of the second": lambda h: F.gelu(h[:, 64:]),
    "logit": lambda h: torch.logit(h.sigmoid()[:, :64]),
}


@pytest.mark.parametrize("dtype", slow_but([torch.float32], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("case", HALVES)
def test_an_operator_with_code_for_whole_tensors_is_refused_on_parts_of_rows(
    fake_ranks, case, dtype
):
    """A single such row is a whole tensor: one row of a chunk had other bits than among others."""
    verdict = verdict_of(fake_ranks, 128, dtype, lambda h: torch.cat([HALVES[case](h)] * 2, 1))
    assert getattr(verdict, "reason", verdict) is Reason.MAY_ROUND, verdict


@pytest.mark.parametrize("dtype", slow_but([torch.float32], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("name", ["silu", "mish", "softplus", "sigmoid", "elu"])
def test_others_are_proven_on_parts_of_rows(fake_ranks, name, dtype):
    function = getattr(F, name)
    verdict = verdict_of(fake_ranks, 128, dtype, lambda h: torch.cat([function(h[:, :64])] * 2, 1))
    assert isinstance(verdict, RowProof), verdict


@pytest.mark.parametrize("name", sorted(LIE_APART & {*dir(F), *dir(torch)}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_lie_apart_are_computed_as_one_such_row(name, dtype):
    function = getattr(F, name, None) or getattr(torch, name)
    others = {
        "atan2": 1,
        "hypot": 1,
        "fmod": 1,
        "remainder": 1,
        "addcmul": 2,
        "addcdiv": 2,
        "lerp": 2,
    }
    others |= dict.fromkeys(("add", "sub", "rsub", "div"), 1)
    draw = torch.Generator().manual_seed(0)
    rows, gradient = (torch.rand(9, 256, generator=draw).to(dtype) for _ in range(2))
    scale = 2.0 if name in ("acosh", "pow") else 0.9

    def run(part, came):
        leaf = part.clone().requires_grad_()
        x = leaf[:, :128] * scale + (name == "acosh")
        more = [1.7] if name == "pow" else [x.detach() + 0.5] * others.get(name, 0)
        y = function(x, *more)
        return [y.detach(), *torch.autograd.grad(y, leaf, came)]

    together = run(rows, gradient[:, :128])
    for i in range(9):
        alone = run(rows[i : i + 1], gradient[i : i + 1, :128])
        for whole, one in zip(together, alone, strict=True):
            assert torch.equal(whole[i : i + 1], one), name


def through_channels(num_channels):
    shape = (-1, num_channels, 2, 8 // num_channels)
    channels_last = torch.channels_last
    return lambda x: x.view(shape).contiguous(memory_format=channels_last).reshape(-1, 16)


@pytest.mark.parametrize("num_channels", [2, 4])
def test_rows_laid_out_channels_last_are_refused(fake_ranks, num_channels):
    """Without a row the layout is told for another, and sums run in another order."""
    verdict = with_body(fake_ranks, through_channels(num_channels))
    assert getattr(verdict, "reason", verdict) is Reason.UNKNOWN_OPERATOR, verdict
    assert "channels last" in verdict.detail


class UnderAutocast(LoopExperts):
    """Experts under an autocast that the graph itself switches on; `body` changes their results."""

    body = staticmethod(lambda y: y)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)

    def expert(self, x, e):
        return self.body((x @ self.w1[e]) @ self.w2[e])


def test_rounding_is_judged_in_the_types_that_autocast_makes(fake_ranks):
    """A bfloat16 reciprocal root, which rounds by position, was taken for a float32 one."""

    def normed(y):
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)

    x = torch.randn(32, 16, requires_grad=True)
    plain = judge(UnderAutocast(16, 64, 8, 2, fake_ranks, torch.float32), x)
    assert isinstance(plain, RowProof), plain
    style = type("Normed", (UnderAutocast,), {"body": staticmethod(normed)})
    verdict = judge(style(16, 64, 8, 2, fake_ranks, torch.float32), x)
    assert getattr(verdict, "reason", verdict) is Reason.MAY_ROUND, verdict
    assert "bfloat16" in verdict.detail


class OneExpertHandsThrough(UnderAutocast):
    """The last local expert changes nothing: its rows keep float32, others have bfloat16."""

    def expert(self, x, e):
        return x if e == self.local - 1 else super().expert(x, e)


def test_a_concatenation_that_autocast_promotes_keeps_its_inputs(fake_ranks):
    """A chunk without the float32 piece joined bfloat16 pieces, and in that type."""
    x = torch.randn(32, 16, requires_grad=True)
    proof = judge(OneExpertHandsThrough(16, 64, 8, 2, fake_ranks, torch.float32), x)
    assert isinstance(proof, RowProof), proof
    promoted = [node for node in proof.joins if len({t.dtype for t in joined_by(node)}) > 1]
    assert not promoted


def joined_by(node):
    return [tensor_of(piece) for piece in node.args[0]]
