"""Messages in eight bits, picked by an index, become rows again: one read, one write.

Contract
    Row i is float32(payload) * scale of message `index[i]`, rounded once to the output's dtype.

A program takes TILE_BLOCKS consecutive blocks of the output, counted row after row, as
`gather_quantize_pack` does; work beyond the last block repeats the last block.

Worked example: message [0x7e, 0xf6, 0, 0, float32(1 / 448)] of width 2 is 448.0 and -224.0 times
1 / 448, so the row [1.0, -0.5].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_compile.ops.wire_format import BLOCK, num_blocks, row_bytes

TILE_BLOCKS = tl.constexpr(32)
"""Blocks per program: 128 threads hold 32 columns each."""
NUM_WARPS = 4
COLUMNS = tl.constexpr(BLOCK)


@triton.jit(do_not_specialize=["num_rows"])
def unpack_dequantize_kernel(
    messages: tl.tensor,  # [M, MESSAGE] bytes
    index: tl.tensor,  # [num_rows], or None
    rows: tl.tensor,  # [num_rows, WIDTH]
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,  # per row
    MESSAGE: tl.constexpr,  # bytes of a message
) -> None:
    """Unpack the blocks of one tile."""
    start = tl.program_id(0).to(tl.int64) * TILE_BLOCKS
    position = (start % BLOCKS).to(tl.int32) + tl.arange(0, TILE_BLOCKS)
    row = tl.minimum(start // BLOCKS + position // BLOCKS, num_rows - 1)
    block = position % BLOCKS
    source = row if index is None else tl.load(index + row).to(tl.int64)

    scale_of_row = MESSAGE // 4  # in units of the scales' four bytes
    first_scale = scale_of_row - BLOCKS
    scales = messages.to(tl.pointer_type(tl.float32), bitcast=True)
    scale = tl.load(scales + source * scale_of_row + (first_scale + block))

    column = block[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    pointers = messages + source[:, None] * MESSAGE + column
    targets = rows + row[:, None] * WIDTH + column
    if BLOCKS * COLUMNS == WIDTH:
        payload = tl.load(pointers)
    else:
        payload = tl.load(pointers, mask=column < WIDTH, other=0)
    value = payload.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
    if BLOCKS * COLUMNS == WIDTH:
        tl.store(targets, value.to(rows.dtype.element_ty))
    else:
        tl.store(targets, value.to(rows.dtype.element_ty), mask=column < WIDTH)


def unpack_dequantize(
    messages: torch.Tensor, index: torch.Tensor | None, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return rows `[R, width]` of `dtype`; row i is message `index[i]`, or message i.

    Shapes: messages `[M, row_bytes(width)]` of bytes, at an address that 4 divides; index `[R]` of
    integers in [0, M). Either is copied first where it is not contiguous.
    """
    num_rows, blocks = messages.shape[0] if index is None else index.shape[0], num_blocks(width)
    rows = messages.new_empty((num_rows, width), dtype=dtype)
    if rows.numel():
        grid = (triton.cdiv(num_rows * blocks, TILE_BLOCKS.value),)
        messages, index = messages.contiguous(), None if index is None else index.contiguous()
        with torch.cuda.device_of(messages):
            unpack_dequantize_kernel[grid](
                messages, index, rows, num_rows, width, blocks, row_bytes(width),
                num_warps=NUM_WARPS,
            )  # fmt: skip
    return rows
