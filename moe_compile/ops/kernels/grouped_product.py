"""Rows in eight bits times the weight of their group, with scales of 1 x 128 and 128 x 128.

Contract
    Sums of 128 products are taken by tensor cores, scaled, and added up in float32 outside of them,
    which keep about 14 bits while they sum (DeepSeek-V3, section 3.3.2 of its report).
    The tiles of each group are found on the device, from the ends of the groups: the host knows
    only how many there are at most. Rows behind the last group are a group without a weight: zeros.

A program computes ROWS x COLUMNS elements of the result, all of one group:

    for each block k of 128 columns of its rows:
        partial = rows[:, k] @ weight[k, :]                   tensor cores, float32
        sum     = sum + partial * (row_scale[:, k] * weight_scale[k, columns])

Rows and columns of which 16 divides the length come 16 bytes at a time; others are right, and slow.
A tile that its group does not fill repeats the group's last row and stores it no second time, so
that no load of rows has a mask. Tiles are numbered group after group. Programs take eight tiles of
rows, then the next columns, so that those that run at once read few rows and weights.

Worked example: groups end at [130, 130, 140], ROWS = 128, of 150 rows. Group 0 has tiles 0 and 1,
of 128 and 2 rows; group 1 none; group 2 tile 2, of 10 rows; tile 3 is the 10 rows of no group.
At most there are 150 / 128, rounded up, and one more for each of the three ends: 5 tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_compile.ops.wire_format import BLOCK

ROWS = 128
COLUMNS = tl.constexpr(BLOCK)
"""Of a tile: those of one scale, so that a tile has one scale of the weight at a time."""
DEPTH = tl.constexpr(BLOCK)
"""Columns of the rows that share a scale."""
NUM_WARPS = 8
NUM_STAGES = 4
"""Blocks of both operands in shared memory at once, 32 KiB each."""
TILES_IN_TURN = tl.constexpr(8)


@triton.jit
def find_group(
    ends: tl.tensor,  # [NUM_GROUPS] int32
    tile: tl.tensor,
    num_rows: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two above NUM_GROUPS
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the group of a tile, its first row, and the end of the group's rows.

    Group NUM_GROUPS has the rows behind the last end. A tile beyond all has no row: the first row
    is not before the end.
    """
    group = tl.arange(0, GROUPS)
    end = tl.load(ends + group, mask=group < NUM_GROUPS, other=num_rows)
    start = tl.load(ends + group - 1, mask=(group > 0) & (group <= NUM_GROUPS), other=num_rows)
    start = tl.where(group == 0, 0, start)
    end, start = tl.minimum(end, num_rows), tl.minimum(start, num_rows)
    tiles = tl.cdiv(end - start, ROWS)
    behind = tl.cumsum(tiles, 0)
    mine = tl.sum((behind <= tile).to(tl.int32), 0)
    is_mine = group == mine
    first = tl.sum(tl.where(is_mine, start + (tile - behind + tiles) * ROWS, 0), 0)
    return mine, first, tl.sum(tl.where(is_mine, end, 0), 0)


@triton.jit
def sum_of_blocks(
    a: tl.tensor,  # places of [ROWS, DEPTH] of the rows
    b: tl.tensor,  # places of [DEPTH, COLUMNS] of the weight
    a_scales: tl.tensor,  # places of [ROWS] scales
    b_scales: tl.tensor,  # place of a scale
    depth: tl.tensor,
    WIDTH: tl.constexpr,
    OF_BLOCK: tl.constexpr,  # scales of a weight from a block of WIDTH to the next
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Return the sum of the scaled products of all blocks of WIDTH."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in range(tl.cdiv(WIDTH, DEPTH)):
        if tl.cdiv(WIDTH, DEPTH) * DEPTH == WIDTH:
            of_rows = tl.load(a + block * DEPTH)
            of_weight = tl.load(b + block * DEPTH)
        else:
            there = depth < WIDTH - block * DEPTH
            of_rows = tl.load(a + block * DEPTH, mask=there[None, :], other=0.0)
            of_weight = tl.load(b + block * DEPTH, mask=there[:, None], other=0.0)
        scales = tl.load(a_scales + block) * tl.load(b_scales + block * OF_BLOCK)
        total += tl.dot(of_rows, of_weight) * scales[:, None]
    return total


@triton.jit(do_not_specialize=["num_rows"])
def grouped_product_kernel(
    rows: tl.tensor,  # [num_rows, WIDTH] of eight bits
    row_scales: tl.tensor,  # [num_rows, blocks of WIDTH]
    weight: tl.tensor,  # [NUM_GROUPS, WIDTH, NUM_COLUMNS], column after column
    weight_scales: tl.tensor,  # [NUM_GROUPS, blocks of WIDTH, blocks of NUM_COLUMNS]
    ends: tl.tensor,  # [NUM_GROUPS]
    products: tl.tensor,  # [num_rows, NUM_COLUMNS]
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute one tile of the products."""
    across, blocks = tl.cdiv(NUM_COLUMNS, COLUMNS), tl.cdiv(WIDTH, DEPTH)
    in_turn = TILES_IN_TURN * across
    turn, place = tl.program_id(0) // in_turn, tl.program_id(0) % in_turn
    tile, column_block = turn * TILES_IN_TURN + place % TILES_IN_TURN, place // TILES_IN_TURN
    group, first, end = find_group(ends, tile, num_rows, NUM_GROUPS, GROUPS, ROWS)
    if first >= end:
        return

    local, depth = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if group < NUM_GROUPS:
        read, taken = tl.minimum(local, end - first - 1), tl.minimum(column, NUM_COLUMNS - 1)
        a = rows + first.to(tl.int64) * WIDTH + (read[:, None] * WIDTH + depth[None, :])
        b = weight + group.to(tl.int64) * (WIDTH * NUM_COLUMNS)
        b += taken[None, :] * WIDTH + depth[:, None]
        a_scales = row_scales + first.to(tl.int64) * blocks + read * blocks
        b_scales = weight_scales + group * (blocks * across) + column_block
        total = sum_of_blocks(a, b, a_scales, b_scales, depth, WIDTH, across, ROWS)

    targets = products + first.to(tl.int64) * NUM_COLUMNS
    targets += local[:, None] * NUM_COLUMNS + column[None, :]
    stored = (local[:, None] < end - first) & (column[None, :] < NUM_COLUMNS)
    tl.store(targets, total.to(products.dtype.element_ty), mask=stored)


def grouped_product(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    ends: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the products `[R, N]` of rows and the weight of their group.

    Shapes: rows `[R, K]` of e4m3 or e5m2, row_scales `[R, K / 128]`, weight `[E, K, N]` of e4m3,
    weight_scales `[E, K / 128, N / 128]`, blocks rounded up, ends `[E]` int32. Any that is not as
    the operators of `scaled_products` make it in memory is copied first.
    """
    (num_rows, width), (experts, _, columns) = rows.shape, weight.shape
    products = rows.new_empty((num_rows, columns), dtype=dtype)
    if products.numel():
        most_tiles = triton.cdiv(num_rows, ROWS) + experts
        turns = triton.cdiv(most_tiles, TILES_IN_TURN.value)
        grid = (turns * TILES_IN_TURN.value * triton.cdiv(columns, COLUMNS.value),)
        with torch.cuda.device_of(rows):
            grouped_product_kernel[grid](
                rows.contiguous(),
                row_scales.contiguous(),
                weight.transpose(1, 2).contiguous(),
                weight_scales.contiguous(),
                ends.contiguous(),
                products,
                num_rows,
                width,
                columns,
                experts,
                triton.next_power_of_2(experts + 1),
                ROWS,
                num_warps=NUM_WARPS,
                num_stages=NUM_STAGES,
            )
    return products
