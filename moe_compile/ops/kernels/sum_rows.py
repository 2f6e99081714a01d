"""Sums, and dot products, of rows picked by a matrix of places: each row read once.

Contract
    Both add in float32, or in float64 for float64 input, and round to the result's type once.
    Sums add from the first place on, `total + row` or `total + row * weight`, so that a sum of one
    row is that row to the sign of its zeros. A place of -1 adds nothing.
    Dot products are of the rows of one line of places with one row of `others`, BLOCK columns at a
    time. Every place has a row.
    A kernel that calls `row_at` is compiled once for any numbers of rows, which change with every
    step. Triton specializes a kernel on a number in a tuple that is 1 or divisible by 16, whatever
    `do_not_specialize` says: starts are given as `4 * start + 3`, which is neither.

A program makes BLOCK columns of one sum, all its rows in flight at once, or one product: the
products of one line follow one another, and the line's row is in a cache.

Worked example: rows [a, b, c], places [[1, -1], [0, 2]]: sums [b, a + c]; with others [x, y] and
places [[1, 0], [0, 2]]: products [[b x, a x], [a y, c y]].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


@triton.jit
def row_at(
    rows: tl.tuple,  # each [.., WIDTH]
    starts: tl.tuple,  # as `starts_of` gives them
    place: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Return a pointer to the first element of row `place` of all."""
    source = rows[0]
    first = place * 0
    for matrix in tl.static_range(1, len(rows)):
        start = starts[matrix - 1] >> 2
        is_later = place >= start
        source = tl.where(is_later, rows[matrix], source)
        first = tl.where(is_later, start, first)
    return source + (place - first) * WIDTH


def starts_of(rows: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return, for `row_at`, the number of the first row of each matrix but the first."""
    numbers = (sum(one.shape[0] for one in rows[:matrix]) for matrix in range(1, len(rows)))
    return tuple(4 * number + 3 for number in numbers)


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
    """Return the type in which values of these tensors are added up."""
    doubles = (one is not None and one.dtype is torch.float64 for one in given)
    return tl.float64 if any(doubles) else tl.float32


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
