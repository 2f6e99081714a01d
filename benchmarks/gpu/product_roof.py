"""The least time of products in eight bits on an H100 or H200, computed and not measured.

    python -m benchmarks.gpu.product_roof

For grouped products `[R, K] x [E, K, N]` of recipe "blockwise", rows spread evenly over the groups:

    roof     the longer of two times: 2 R K N operations at 1,979e12 a second, and the bytes of
             payloads, scales and results, each read or written once, at 3.35e12 a second
    tiles    what the kernel does: a tile of 128 x 128 for each 128 rows of a group, rounded up, in
             waves of 132 programs. Each block of 128 columns of K takes the longer of two times:
             512 cycles of a tensor core, with 128 for 16,384 multiply-adds where nothing overlaps;
             and 845 cycles for 32 KiB of both operands to come from the L2 cache

Origin: NVIDIA's data sheet of the H100 SXM has 1,979e12 operations in e4m3 (dense), 3.35e12 bytes
and 132 multiprocessors. 128 multiply-adds of float32 a cycle and multiprocessor are of CUDA's
programming guide, compute capability 9.0. 8,192 operations in eight bits a cycle and multiprocessor
are twice the fp16 of NVIDIA's H100 whitepaper; with the peak they make a clock of 1.83 GHz. The L2
cache's 5,120 bytes a cycle are of NVIDIA's A100 whitepaper, and are assumed of the H100. So `tiles`
is at best 0.61 of the peak, bound by the cache; a larger tile needs more registers than there are.
It leaves out the start and end of a program, and the time until its first operands come.
"""

from __future__ import annotations

import math
from typing import Final

from moe_compile.check.sections import say
from moe_compile.ops.wire_format import BLOCK, num_blocks

OPERATIONS_PER_S: Final = 1979e12
BYTES_PER_S: Final = 3.35e12
MULTIPROCESSORS: Final = 132
OPERATIONS_PER_CYCLE: Final = 8192
MULTIPLY_ADDS_PER_CYCLE: Final = 128
CACHE_BYTES_PER_CYCLE: Final = 5120
"""Of all multiprocessors together."""
CLOCK_HZ: Final = OPERATIONS_PER_S / MULTIPROCESSORS / OPERATIONS_PER_CYCLE
RESULT_BYTES: Final = 2
SCALE_BYTES: Final = 4

SHAPES: Final = (
    ("DeepSeek-V3, gate or up, 8 experts of a rank", 32768, 7168, 2048, 8),
    ("DeepSeek-V3, down, 8 experts of a rank", 32768, 2048, 7168, 8),
    ("DeepSeek-V3, gate or up, one chunk of four", 8192, 7168, 2048, 2),
    ("gpt-oss 120B, down, 16 experts of a rank", 16384, 2880, 2880, 16),
    ("few rows: 16 to an expert", 128, 7168, 2048, 8),
)
"""What, R, K, N, E."""


def roof_us(rows: int, width: int, columns: int, experts: int) -> float:
    """Return the least time of a product, microseconds."""
    operations = 2 * rows * width * columns
    payloads = rows * width + experts * width * columns
    scales = rows * num_blocks(width) + experts * num_blocks(width) * num_blocks(columns)
    moved = payloads + SCALE_BYTES * scales + RESULT_BYTES * rows * columns
    return 1e6 * max(operations / OPERATIONS_PER_S, moved / BYTES_PER_S)


def tiles_us(rows: int, width: int, columns: int, experts: int) -> float:
    """Return the time of the kernel's waves of tiles, microseconds."""
    tiles = experts * math.ceil(rows / experts / BLOCK) * num_blocks(columns)
    multiplying = 2 * BLOCK**3 / OPERATIONS_PER_CYCLE
    scaling = BLOCK**2 / MULTIPLY_ADDS_PER_CYCLE
    loading = 2 * BLOCK**2 * MULTIPROCESSORS / CACHE_BYTES_PER_CYCLE
    waves = math.ceil(tiles / MULTIPROCESSORS)
    cycles = waves * num_blocks(width) * max(multiplying + scaling, loading)
    return 1e6 * cycles / CLOCK_HZ


def main() -> None:
    """Print both times of every shape."""
    say("computed, not measured:   roof us  tiles us  share of roof")
    for what, *shape in SHAPES:
        roof, tiles = roof_us(*shape), max(tiles_us(*shape), roof_us(*shape))
        say(f"{roof:33.1f} {tiles:9.1f} {roof / tiles:14.2f}   {what} {shape}")


if __name__ == "__main__":
    main()
