"""Attention in groups of heads, scheduled, equals eager bit for bit, forward and backward."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from moe_compile.plan.chunk_numbers import NumericalChange
from moe_compile.report.process_report import REPORT
from moe_compile.testing.equivalence import differing_tensors
from tests.attention_layers import (
    STYLES,
    LatentAttention,
    RepeatedKVAttention,
)
from tests.attention_variants import VARIANTS, UnderAutocast
from tests.slow_parameters import slow_but


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention layer on a number of ranks, and the groups it is split in."""

    heads: int
    kv_heads: int
    groups: int
    batch: int
    positions: int
    dtype: torch.dtype
    seed: int


def run_case(rank, case, style):
    """Return what differs from eager, and the verdict on the attention."""
    torch._dynamo.reset()
    own = torch.Generator().manual_seed(1000 * case.seed + rank)
    shape = (case.batch, case.positions, 16)
    pair = [torch.randn(shape, generator=own).to(case.dtype) for _ in range(2)]
    options = {"megamoe.attention_chunks": case.groups, "megamoe.strict": True}

    def build():
        return style(16, case.heads, case.kv_heads, 8, dist.group.WORLD, case.dtype, seed=case.seed)

    differing = differing_tensors(build, [tuple(pair)], options)
    attention = REPORT.compilations[-1].attention if REPORT.compilations else []
    return differing, [(a.num_chunks, a.verdict) for a in attention]


def check(pool, case, style):
    for rank, (differing, verdicts) in enumerate(pool.run(run_case, case, style)):
        assert not differing, f"rank {rank}: {differing}"
        assert verdicts == [(case.groups, "chunked")]


ANY = Case(heads=8, kv_heads=4, groups=2, batch=2, positions=4, dtype=torch.float32, seed=0)
"""A group has two heads of a rank: where torch has no fused kernel a CPU rounds one otherwise."""


MIRRORED = [style for style in (*STYLES, *VARIANTS) if style is not LatentAttention]
"""All but the one whose gradient is reduced and scattered, which mirrored ranks cannot."""


@pytest.mark.parametrize(
    "style", slow_but([STYLES[0], UnderAutocast], MIRRORED), ids=lambda s: s.__name__
)
def test_attention_in_groups_of_heads_equals_eager(mirrored_ranks, style):
    check(mirrored_ranks, ANY, style)


@pytest.mark.slow
def test_attention_whose_keys_are_gathered_equals_eager(two_ranks):
    check(two_ranks, ANY, LatentAttention)


def remarks_of(rank):
    (attention,) = REPORT.compilations[-1].attention
    return attention.remarks


@pytest.mark.parametrize(
    ("heads", "dtype"),
    slow_but([(18, torch.float64)], [(18, torch.float64), (6, torch.float32)]),
    ids=["float64", "one head"],
)
def test_values_of_another_size_than_keys_differ_in_last_bits_and_the_report_says_so(
    two_ranks, heads, dtype
):
    case = Case(heads=heads, kv_heads=6, groups=3, batch=2, positions=4, dtype=dtype, seed=6117)
    for differing, verdicts in two_ranks.run(run_case, case, LatentAttention):
        assert verdicts == [(3, "chunked")]
        assert all(float(said.split()[-1]) < 8 * torch.finfo(dtype).eps for said in differing)
    assert all(NumericalChange.HEADS.value in said for said in two_ranks.run(remarks_of))


def few_kv_heads(kv_heads, ranks):
    """KV heads repeated to two for each rank: the groups share them."""
    heads, floats = 2 * ranks, torch.float32
    return Case(
        heads=heads, kv_heads=kv_heads, groups=2, batch=2, positions=6, dtype=floats, seed=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_kv_heads_than_four_ranks_equal_eager(four_devices, kv_heads):
    check(four_devices, few_kv_heads(kv_heads, 4), RepeatedKVAttention)


@pytest.mark.slow
def test_groups_that_do_not_divide_the_kv_heads_leave_the_region_whole(two_ranks):
    case = Case(heads=8, kv_heads=4, groups=3, batch=1, positions=4, dtype=torch.float32, seed=0)
    for style in (STYLES[0], LatentAttention):
        for differing, ((groups, verdict),) in two_ranks.run(run_case, case, style):
            assert not differing
            assert groups == 1
            assert verdict.startswith(
                "the local KV heads must divide into equal groups, and do not"
            )
