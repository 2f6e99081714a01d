"""Projections cut by groups of heads round otherwise; their error stays that of a whole product."""

import pytest
import torch
import torch.distributed as dist

from moe_compile.plan.chunk_numbers import Bound
from moe_compile.report.process_report import REPORT
from tests.attention_layers import (
    STYLES,
    FusedProjection,
    LatentAttention,
    NormedAttention,
    RepeatedKVAttention,
    SharedKeyAttention,
    TitanAttention,
)
from tests.slow_parameters import exhaustive_but, slow_but

WIDTH, HEADS, KV_HEADS, HEAD_WIDTH = 32, 16, 8, 8
TIMES = 2.0
"""What the root mean square error may be of the whole products': measured up to 1.45, for the
weight of a small norm; each group adds a rounding as large as that of the whole result."""
QUICK = (NormedAttention, FusedProjection, TitanAttention)
BOTH = (Bound.QKV.value, Bound.OUT.value)
ROUNDED_BY_GROUP = (LatentAttention, NormedAttention, SharedKeyAttention)
"""Without a fused kernel, which the report says besides."""


def results(layer, function, x, gradient):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(gradient)
    return {
        "output": y.detach(),
        "input": x.grad,
        **{name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None},
    }


def errors(rank, style, dtype, which, groups, kv_heads):
    """Return per tensor the error whole and split, and the report's remarks."""
    torch._dynamo.reset()

    def build(dtype):
        return style(WIDTH, HEADS, kv_heads, HEAD_WIDTH, dist.group.WORLD, dtype)

    layer, exact = build(dtype), build(torch.float64)
    with torch.no_grad():
        for p, q in zip(layer.parameters(), exact.parameters(), strict=True):
            q.copy_(p)
    own = torch.Generator().manual_seed(rank)
    x, gradient = (torch.randn(2, 24, WIDTH, generator=own).to(dtype) for _ in range(2))
    options = {
        "megamoe.attention_chunks": groups,
        "megamoe.attention_split": which,
        "megamoe.codegen": "fx",
    }
    compiled = torch.compile(layer, backend="megamoe", fullgraph=True, options=options)
    reference = results(exact, exact, x.double(), gradient.double())
    whole, split = results(layer, layer, x, gradient), results(layer, compiled, x, gradient)
    found = {
        name: tuple(_error(computed[name], expected) for computed in (whole, split))
        for name, expected in reference.items()
    }
    return found, REPORT.compilations[-1].attention[-1].remarks


def _error(tensor, expected):
    return (tensor.double() - expected).square().mean().sqrt().item()


def check(pool, style, dtype, which, groups, remarks, kv_heads=KV_HEADS):
    for found, said in pool.run(errors, style, dtype, which, groups, kv_heads):
        assert said == ((Bound.HEADS.value,) if style in ROUNDED_BY_GROUP else ()) + remarks
        for name, (whole, split) in found.items():
            assert split <= TIMES * whole, (style.__name__, name, whole, split)


@pytest.mark.parametrize("style", slow_but([FusedProjection], QUICK), ids=lambda s: s.__name__)
def test_the_error_of_split_projections_is_that_of_whole_ones(mirrored_ranks, style):
    check(mirrored_ranks, style, torch.float32, "both", 2, BOTH)


@pytest.mark.slow
def test_kv_heads_repeated_for_the_ranks_are_projected_whole(mirrored_ranks):
    """The groups share them: they are cut where they are repeated."""
    check(mirrored_ranks, RepeatedKVAttention, torch.float32, "both", 2, BOTH, kv_heads=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("style", exhaustive_but(QUICK, STYLES), ids=lambda s: s.__name__)
def test_the_error_of_any_style_of_split_projections_is_that_of_whole_ones(two_ranks, style, dtype):
    check(two_ranks, style, dtype, "both", 4, BOTH)


@pytest.mark.slow
@pytest.mark.parametrize(("which", "remarks"), [("qkv", BOTH[:1]), ("out", BOTH[1:]), ("none", ())])
def test_only_what_is_asked_for_is_split(two_ranks, which, remarks):
    check(two_ranks, NormedAttention, torch.float32, which, 2, remarks)


@pytest.mark.parametrize("style", exhaustive_but(QUICK, STYLES), ids=lambda s: s.__name__)
def test_projections_are_split_on_four_ranks(four_ranks, style):
    check(four_ranks, style, torch.float32, "both", 2, BOTH)
