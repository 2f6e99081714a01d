"""Dot products of rows picked by a matrix of places with one row for each of its lines.

Contract
    Multiplies and adds in float32, where either row is float64 in float64, BLOCK columns at a time;
    rounded to the products' type once. Every place has a row.

A program makes one product. Those of one line follow one another: the line's row is in a cache.

Worked example: rows [a, b, c], places [[1, 0], [0, 2]], others [x, y]: [[b x, a x], [a y, c y]].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from moe_compile.ops.kernels.chosen_rows import row_at, starts_of
from moe_compile.ops.kernels.sum_rows import BLOCK, NUM_WARPS, wide_of


@triton.jit
def dot_rows_kernel(
    rows: tl.tuple,  # [R, WIDTH] in all
    starts: tl.tuple,
    places: tl.tensor,  # [N, MOST]
    others: tl.tensor,  # [N, WIDTH]
    dots: tl.tensor,  # [N, MOST]
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Make one product."""
    number = tl.program_id(0).to(tl.int64)
    row = row_at(rows, starts, tl.load(places + number), WIDTH)
    other = others + number // MOST * WIDTH
    total = tl.zeros((BLOCK,), WIDE)
    for first in tl.static_range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        left = tl.load(row + column, mask=inside, other=0.0).to(WIDE)
        total += left * tl.load(other + column, mask=inside, other=0.0).to(WIDE)
    tl.store(dots + number, tl.sum(total).to(dots.dtype.element_ty))


def dot_rows(
    rows: Sequence[torch.Tensor], places: torch.Tensor, others: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return products `[N, most]` of type `dtype` of `rows` `[R, D]` and `others` `[N, D]`.

    `rows` may be several matrices, numbered through. Places are int64 in [0, R), `[N, most]`. Each
    is copied first where it is not contiguous.
    """
    dots = places.new_empty(places.shape, dtype=dtype)
    if dots.numel():
        rows, places = [one.contiguous() for one in rows], places.contiguous()
        others, wide = others.contiguous(), wide_of(rows[0], others)
        with torch.cuda.device_of(places):
            dot_rows_kernel[(places.numel(),)](
                tuple(rows), starts_of(rows), places, others, dots,
                others.shape[1], places.shape[1], wide, BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip
    return dots
