"""Contributions of ranks to a gradient, and what their sum may be when each is rounded once."""

import torch

BF16_ROUNDING = 2.0**-8
"""Largest relative error of rounding to bfloat16: half of its 2**-7."""
BF16_SUBNORMAL = 2.0**-134
"""Half of the smallest bfloat16."""
FP32_ROUNDING = 2.0**-24
MAGNITUDES = (0.0, 1e-42, 1e-39, 1e-20, 1.0, 1.0, 1.0, 3e4, 1e35)


def contribution(rank, shape, seed):
    """Return what `rank` contributes: any rank can compute it."""
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    values = torch.randn(shape, generator=generator)
    chosen = torch.randint(len(MAGNITUDES), shape, generator=generator)
    return values * torch.tensor(MAGNITUDES)[chosen]


def check_rounded_once(result, contributions, scale=1.0):
    """Raise unless float32 `result` is the scaled sum, each contribution rounded once to bfloat16.

    Two bounds hold: that of one rounding each, and float32's alone once they are rounded.
    """
    n = len(contributions)
    assert result.dtype == torch.float32
    for given, rounding, least in (
        ([c.to(torch.bfloat16) for c in contributions], 0.0, 0.0),
        (contributions, BF16_ROUNDING, BF16_SUBNORMAL),
    ):
        terms = torch.stack([g.double() for g in given])
        sums = (n + 1) * FP32_ROUNDING * (1 + rounding)
        bound = (rounding + sums) * terms.abs().sum(0) + n * least + 2.0**-149
        error = (result.double() - scale * terms.sum(0)).abs()
        assert (error <= max(scale, 1.0) * bound).all(), (error - bound).max()
