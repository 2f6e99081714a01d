"""Rows picked by an index, copied in the widest words that the rows allow.

Contract
    Equals `rows[index]` bit for bit, for element types of 1, 2, 4 and 8 bytes.

A program copies TILE_CHUNKS consecutive chunks of the output, counted row after row, each of 512
bytes or the rest of a row; work beyond the last row repeats chunks of it.

Worked example: rows of 7168 bf16 columns are 1792 words of 8 bytes, 28 chunks of 64 words; program
3 copies chunks 48 to 63: the last 8 of output row 1 and the first 8 of row 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK_BYTES = 512
"""Bytes that one warp moves with one access of 16 bytes per thread."""
TILE_CHUNKS = tl.constexpr(16)
"""Chunks per program: 128 threads, 64 bytes of each on their way at once."""
NUM_WARPS = 4
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit(do_not_specialize=["num_rows", "num_sources"])
def gather_rows_kernel(
    rows: tl.tensor,  # [S, WIDTH] words
    index: tl.tensor,  # [num_rows]
    gathered: tl.tensor,  # [num_rows, WIDTH] words
    num_rows: tl.tensor,
    num_sources: tl.tensor,
    WIDTH: tl.constexpr,  # words of a row
    CHUNK: tl.constexpr,  # words of a chunk
    CHUNKS: tl.constexpr,  # per row
) -> None:
    """Copy the chunks of one tile."""
    start = tl.program_id(0).to(tl.int64) * TILE_CHUNKS
    position = (start % CHUNKS).to(tl.int32) + tl.arange(0, TILE_CHUNKS)
    row = tl.minimum(start // CHUNKS + position // CHUNKS, num_rows - 1)
    chunk = position % CHUNKS
    source = tl.load(index + row).to(tl.int64)
    source = tl.where(source < 0, source + num_sources, source)

    column = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    pointers = rows + source[:, None] * WIDTH + column
    targets = gathered + row[:, None] * WIDTH + column
    if WIDTH % CHUNK == 0:
        tl.store(targets, tl.load(pointers))
    else:
        tl.store(targets, tl.load(pointers, mask=column < WIDTH), mask=column < WIDTH)


def gather_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return `rows[index]`. Shapes: rows `[S, D]`, index `[R]` of integers in [-S, S).

    Either is copied first where it is not contiguous.
    """
    num_rows = index.shape[0]
    gathered = rows.new_empty((num_rows, rows.shape[1]))
    if gathered.numel():
        rows, index = rows.contiguous(), index.contiguous()
        word = _widest_word(rows)
        source, target = rows.view(word), gathered.view(word)
        width, chunk = source.shape[1], CHUNK_BYTES // word.itemsize
        chunks = triton.cdiv(width, chunk)
        grid = (triton.cdiv(num_rows * chunks, TILE_CHUNKS.value),)
        with torch.cuda.device_of(rows):
            gather_rows_kernel[grid](
                source,
                index,
                target,
                num_rows,
                rows.shape[0],
                width,
                chunk,
                chunks,
                num_warps=NUM_WARPS,
            )
    return gathered


def _widest_word(rows: torch.Tensor) -> torch.dtype:
    row_size = rows.shape[1] * rows.element_size()
    offset = rows.storage_offset() * rows.element_size()
    return next(w for w in WORDS if row_size % w.itemsize == 0 and offset % w.itemsize == 0)
