"""Gradients of weights in eight bits: rows quantised along rows, block by block, and multiplied.

Contract
    Values and layout are those of `moe_compile.ops.weight_gradients`.
    Sums of 128 products are taken by tensor cores, scaled, and added up in float32 outside of them,
    as in `grouped_product`.
    The blocks of each group are found on the device, from the ends of the groups: the host knows
    only how many there are at most.

    columns_by_block     a block of 128 rows and 64 columns per program, read row after row and
                         written column after column
    weight_gradient      128 x 128 elements of one group's gradient per program

        for each block b of the group:
            partial = rows[b, K tile, :] @ grads[b, N tile, :].t()      tensor cores, float32
            sum     = sum + partial * (row_scale[b, K tile] x grad_scale[b, N tile])

Both operands have 128 rows along memory, 16 bytes at a time, whatever the ends of the groups: a
block starts with its group, so that no load of the product has a mask. A tile beyond the last
column repeats that column and stores it no second time.

Worked example: groups end at [130, 130, 140]. Group 0 has blocks 0 and 1, group 1 none: its
gradient is zeros; group 2 block 2, of 10 rows and 118 rows of zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_compile.ops.kernels.grouped_product import find_group
from moe_compile.ops.kernels.pack_rows import MAGNITUDE, element_constants
from moe_compile.ops.product_formats import Element
from moe_compile.ops.wire_format import BLOCK

DEPTH = tl.constexpr(BLOCK)
"""Rows of a block, which share a scale."""
COLUMNS = tl.constexpr(64)
"""Of a tile that is quantised."""
QUANTIZE_WARPS = 8
"""32 of such a tile's elements to a thread."""
SIDE = tl.constexpr(128)
"""Of a tile of the gradient."""
NUM_WARPS = 8
NUM_STAGES = 4
"""Blocks of both operands in shared memory at once, 32 KiB each."""


@triton.jit(do_not_specialize=["num_rows"])
def columns_by_block_kernel(
    rows: tl.tensor,  # [num_rows, WIDTH]
    ends: tl.tensor,  # [NUM_GROUPS] int32
    payload: tl.tensor,  # [blocks, WIDTH, DEPTH] bytes
    scales: tl.tensor,  # [blocks, WIDTH]
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two above NUM_GROUPS
    LARGEST: tl.constexpr,
    LEAST_BITS: tl.constexpr,
    ELEMENT: tl.constexpr,
) -> None:
    """Quantise one tile: 128 rows of one group, or zeros."""
    across = tl.cdiv(WIDTH, COLUMNS)
    block, place = tl.program_id(0) // across, tl.program_id(0) % across
    group, first, end = find_group(ends, block, num_rows, NUM_GROUPS, GROUPS, DEPTH)
    end = tl.where(group < NUM_GROUPS, end, 0)
    row, column = tl.arange(0, DEPTH), place * COLUMNS + tl.arange(0, COLUMNS)
    sources = rows + first.to(tl.int64) * WIDTH + (row[:, None] * WIDTH + column[None, :])
    inside = (row < end - first)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(sources, mask=inside, other=0.0).to(tl.float32)
    bits = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, axis=0)
    largest = tl.maximum(bits, LEAST_BITS).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(LARGEST, largest)
    values = tl.trans((x * inverse[None, :]).to(ELEMENT).to(tl.uint8, bitcast=True))
    targets = payload + block.to(tl.int64) * (WIDTH * DEPTH)
    targets += column[:, None] * DEPTH + row[None, :]
    tl.store(targets, values, mask=(column < WIDTH)[:, None])
    of_block = scales + block.to(tl.int64) * WIDTH
    tl.store(of_block + column, tl.div_rn(largest, LARGEST), mask=column < WIDTH)


def columns_by_block(
    rows: torch.Tensor, ends: torch.Tensor, element: Element
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload `[B, K, 128]` of rows and scales `[B, K]`, with B = R // 128 + E.

    Shapes: rows `[R, K]` of bf16, fp16 or fp32, ends `[E]` int32. Either is copied first where it
    is not contiguous.
    """
    (num_rows, width), experts = rows.shape, ends.shape[0]
    blocks = num_rows // BLOCK + experts
    payload = rows.new_empty((blocks, width, BLOCK), dtype=element.dtype)
    scales = rows.new_empty((blocks, width), dtype=torch.float32)
    if scales.numel():
        with torch.cuda.device_of(rows):
            columns_by_block_kernel[(blocks * triton.cdiv(width, COLUMNS.value),)](
                rows.contiguous(), ends.contiguous(), payload.view(torch.uint8), scales, num_rows,
                width, experts, triton.next_power_of_2(experts + 1), *element_constants(element),
                num_warps=QUANTIZE_WARPS,
            )  # fmt: skip
    return payload, scales


@triton.jit
def blocks_of_group(
    ends: tl.tensor,  # [NUM_GROUPS]
    mine: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first block of a group, and how many it has."""
    group = tl.arange(0, GROUPS)
    end = tl.load(ends + group, mask=group < NUM_GROUPS, other=0)
    start = tl.load(ends + group - 1, mask=(group > 0) & (group < NUM_GROUPS), other=0)
    blocks = tl.cdiv(end - start, DEPTH)
    first = tl.sum(tl.where(group < mine, blocks, 0), 0)
    return first, tl.sum(tl.where(group == mine, blocks, 0), 0)


@triton.jit
def weight_gradient_kernel(
    rows: tl.tensor,  # [blocks, WIDTH, DEPTH] of eight bits
    row_scales: tl.tensor,  # [blocks, WIDTH]
    grads: tl.tensor,  # [blocks, NUM_COLUMNS, DEPTH] of eight bits
    grad_scales: tl.tensor,  # [blocks, NUM_COLUMNS]
    ends: tl.tensor,  # [NUM_GROUPS]
    gradient: tl.tensor,  # [NUM_GROUPS, WIDTH, NUM_COLUMNS]
    WIDTH: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Compute one tile of a group's gradient."""
    across = tl.cdiv(NUM_COLUMNS, SIDE)
    tiles = tl.cdiv(WIDTH, SIDE) * across
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    first, count = blocks_of_group(ends, group, NUM_GROUPS, GROUPS)
    row = (tile // across) * SIDE + tl.arange(0, SIDE)
    column = (tile % across) * SIDE + tl.arange(0, SIDE)
    depth = tl.arange(0, DEPTH)
    taken_row, taken = tl.minimum(row, WIDTH - 1), tl.minimum(column, NUM_COLUMNS - 1)
    a = rows + first.to(tl.int64) * (WIDTH * DEPTH)
    a += taken_row[:, None] * DEPTH + depth[None, :]
    b = grads + first.to(tl.int64) * (NUM_COLUMNS * DEPTH)
    b += taken[None, :] * DEPTH + depth[:, None]
    a_scales = row_scales + first.to(tl.int64) * WIDTH + taken_row
    b_scales = grad_scales + first.to(tl.int64) * NUM_COLUMNS + taken
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for _ in range(count):
        scales = tl.load(a_scales)[:, None] * tl.load(b_scales)[None, :]
        total += tl.dot(tl.load(a), tl.load(b)) * scales
        a += WIDTH * DEPTH
        b += NUM_COLUMNS * DEPTH
        a_scales += WIDTH
        b_scales += NUM_COLUMNS
    targets = gradient + group.to(tl.int64) * (WIDTH * NUM_COLUMNS)
    targets += row[:, None] * NUM_COLUMNS + column[None, :]
    stored = (row < WIDTH)[:, None] & (column < NUM_COLUMNS)[None, :]
    tl.store(targets, total.to(gradient.dtype.element_ty), mask=stored)


def weight_gradient(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    grads: torch.Tensor,
    grad_scales: torch.Tensor,
    ends: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the gradients `[E, K, N]` of weights.

    Shapes: rows `[B, K, 128]` and grads `[B, N, 128]` of e4m3 or e5m2, each with scales `[B, K]`
    and `[B, N]`, ends `[E]` int32. Any that is not contiguous is copied first.
    """
    width, columns, experts = rows.shape[1], grads.shape[1], ends.shape[0]
    gradient = rows.new_empty((experts, width, columns), dtype=dtype)
    if gradient.numel():
        tiles = triton.cdiv(width, SIDE.value) * triton.cdiv(columns, SIDE.value)
        with torch.cuda.device_of(rows):
            weight_gradient_kernel[(experts * tiles,)](
                rows.contiguous(), row_scales.contiguous(), grads.contiguous(),
                grad_scales.contiguous(), ends.contiguous(), gradient, width, columns, experts,
                triton.next_power_of_2(experts + 1), num_warps=NUM_WARPS,
                num_stages=NUM_STAGES,
            )  # fmt: skip
    return gradient
