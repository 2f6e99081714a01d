"""Which rows and columns a program of a kernel works on: a tile of consecutive blocks of rows."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compile.ops.wire_format import BLOCK, SCALE_BYTES

TILE_BLOCKS = tl.constexpr(32)
"""Blocks per program: 128 threads hold 32 columns each, 64 bytes of bf16 on their way at once."""
NUM_WARPS = 4
COLUMNS = tl.constexpr(BLOCK)
SCALE_SIZE = tl.constexpr(SCALE_BYTES)


@triton.jit
def locate_blocks(
    index: tl.tensor,  # [num_rows], or None
    num_rows: tl.tensor,
    num_sources: tl.tensor,
    BLOCKS: tl.constexpr,  # per row
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return each block's row written and row read, its place in the row, and its columns.

    Blocks are counted row after row; beyond the last row they repeat blocks of that row. A
    negative index counts from the end.
    """
    start = tl.program_id(0).to(tl.int64) * TILE_BLOCKS
    position = (start % BLOCKS).to(tl.int32) + tl.arange(0, TILE_BLOCKS)
    row = tl.minimum(start // BLOCKS + position // BLOCKS, num_rows - 1)
    block = position % BLOCKS
    source = row
    if index is not None:
        source = tl.load(index + row).to(tl.int64)
        source = tl.where(source < 0, source + num_sources, source)
    return row, source, block, block[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
