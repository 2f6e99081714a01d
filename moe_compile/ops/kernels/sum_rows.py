"""Sums of rows picked by a matrix of places, each row read once and each sum written once.

Contract
    Adds in float32, of float64 rows in float64, from the first place on: `total + row`, so that a
    sum of one row is that row to the sign of its zeros. A place of -1 adds nothing. The total is
    rounded to the sums' type once.

A program makes BLOCK columns of one sum; all its rows are on their way at once.

Worked example: rows [a, b, c], places [[1, -1], [0, 2]]: sums [b, a + c].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Columns per program: 16 bytes of a row in two bytes an element for each of 128 threads."""
NUM_WARPS = 4


@triton.jit
def sum_rows_kernel(
    rows: tl.tensor,  # [R, WIDTH]
    places: tl.tensor,  # [N, MOST]
    sums: tl.tensor,  # [N, WIDTH]
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Make one block of columns of one sum."""
    number = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    wide = tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32
    place = tl.load(places + number * MOST)
    total = tl.load(rows + place * WIDTH + column, mask=inside & (place >= 0), other=0.0).to(wide)
    for slot in tl.static_range(1, MOST):
        place = tl.load(places + number * MOST + slot)
        row = tl.load(rows + place * WIDTH + column, mask=inside & (place >= 0), other=0.0)
        total = tl.where(place >= 0, total + row.to(wide), total)
    tl.store(sums + number * WIDTH + column, total.to(sums.dtype.element_ty), mask=inside)


def sum_rows(rows: torch.Tensor, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return sums `[N, D]` of type `dtype` of `rows` `[R, D]` at `places` `[N, most]`.

    Places are int64 in [-1, R). Either is copied first where it is not contiguous.
    """
    sums = rows.new_empty((places.shape[0], rows.shape[1]), dtype=dtype)
    if sums.numel():
        rows, places = rows.contiguous(), places.contiguous()
        width = rows.shape[1]
        grid = (places.shape[0], triton.cdiv(width, BLOCK))
        with torch.cuda.device_of(rows):
            sum_rows_kernel[grid](
                rows, places, sums, width, places.shape[1], BLOCK, num_warps=NUM_WARPS
            )
    return sums
