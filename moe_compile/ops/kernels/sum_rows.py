"""Sums of rows picked by a matrix of places, each row read once and each sum written once.

Contract
    Adds in float32, where rows or weights are float64 in float64, from the first place on:
    `total + row`, or `total + row * weight`, so that a sum of one row is that row to the sign of
    its zeros. A place of -1 adds nothing. The total is rounded to the sums' type once.

A program makes BLOCK columns of one sum; all its rows are on their way at once.

Worked example: rows [a, b, c], places [[1, -1], [0, 2]]: sums [b, a + c].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from moe_compile.ops.kernels.chosen_rows import row_at, starts_of

BLOCK = 1024
"""Columns per program: 16 bytes of a row in two bytes an element for each of 128 threads."""
NUM_WARPS = 4


@triton.jit
def sum_rows_kernel(
    rows: tl.tuple,  # [R, WIDTH] in all
    starts: tl.tuple,
    places: tl.tensor,  # [N, MOST]
    weights: tl.tensor,  # [N, MOST], or None
    sums: tl.tensor,  # [N, WIDTH]
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Make one block of columns of one sum."""
    number = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), WIDE)
    for slot in tl.static_range(MOST):
        place = tl.load(places + number * MOST + slot)
        at = row_at(rows, starts, place, WIDTH) + column
        row = tl.load(at, mask=inside & (place >= 0), other=0.0).to(WIDE)
        if weights is not None:
            row *= tl.load(weights + number * MOST + slot).to(WIDE)
        total = row if slot == 0 else tl.where(place >= 0, total + row, total)
    tl.store(sums + number * WIDTH + column, total.to(sums.dtype.element_ty), mask=inside)


def sum_rows(
    rows: Sequence[torch.Tensor],
    places: torch.Tensor,
    dtype: torch.dtype,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return sums `[N, D]` of type `dtype` of `rows` `[R, D]` at `places` `[N, most]`.

    `rows` may be several matrices, numbered through. Places are int64 in [-1, R), `weights`
    `[N, most]`. Each is copied first where it is not contiguous.
    """
    width = rows[0].shape[1]
    sums = rows[0].new_empty((places.shape[0], width), dtype=dtype)
    if sums.numel():
        rows, places = [one.contiguous() for one in rows], places.contiguous()
        weights = None if weights is None else weights.contiguous()
        grid = (places.shape[0], triton.cdiv(width, BLOCK))
        wide = wide_of(rows[0], weights)
        with torch.cuda.device_of(places):
            sum_rows_kernel[grid](
                tuple(rows), starts_of(rows), places, weights, sums,
                width, places.shape[1], wide, BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip
    return sums


def wide_of(*given: torch.Tensor | None) -> tl.dtype:
    """Return the type in which what is read of these is added up."""
    doubles = (one is not None and one.dtype is torch.float64 for one in given)
    return tl.float64 if any(doubles) else tl.float32
