"""Messages of rows of activations in eight bits: e4m3 values and their scales.

Contract
    A row is one run of bytes, so the split lists of the exchange serve as they are.
    A message holds at most 0.52 of the bytes of bf16 rows from 1024 columns on.

A row of D columns takes `row_bytes(D)` bytes, D rounded up to a multiple of 4 called P:

    [0, D)                     column j as float8_e4m3fn, one byte
    [D, P)                     zero
    [P + 4 b, P + 4 b + 4)     scale of block b, columns [128 b, min(128 b + 128, D)):
                               float32, little-endian

The value of a column is its payload times its block's scale. With a = max |column| of a block,
but at least AMAX_MIN, the scale is a / 448 and the payload is column * (448 / a), rounded to the
nearest e4m3, ties to even; quotients and products are float32. So the largest column of a block
is exact but for the rounding of its scale. Every scale is a normal float32 and never zero. A
block that holds an infinity or NaN comes out as NaN, all of it: nothing is silently clamped.

Worked example, D = 2, columns [1.0, -0.5]: a = 1.0, scale = 1/448; payload [448.0, -224.0] is
bytes [0x7e, 0xf6]; P = 4; row_bytes = 8.
"""

from __future__ import annotations

from typing import Final

BLOCK: Final = 128
"""Columns that share a scale, as DeepSeek-V3's activations do (section 3.3.2 of its report)."""
E4M3_MAX: Final = 448.0
"""Largest finite float8_e4m3fn: 1.75 * 2**8."""
AMAX_MIN: Final = E4M3_MAX * 2.0**-126
"""Least maximum of a block: keeps its scale a normal float32 and 448 / a finite."""
SCALE_BYTES: Final = 4


def num_blocks(width: int) -> int:
    """Return the number of scales of a row of `width` columns."""
    return -(-width // BLOCK)


def payload_bytes(width: int) -> int:
    """Return the offset of a row's scales, which lie on multiples of 4 bytes."""
    return -(-width // SCALE_BYTES) * SCALE_BYTES


def row_bytes(width: int) -> int:
    """Return the bytes of a row of `width` columns."""
    return payload_bytes(width) + SCALE_BYTES * num_blocks(width)


def error_bound(value: float, scale: float) -> float:
    """Return the largest error of one column, before its output's rounding.

    Half a unit in the last place of e4m3, three bits of mantissa: 2**-4 of a normal value, 2**-10
    scales of a subnormal one; float32's own roundings add less than 2**-20 of the value.
    """
    return max(2.0**-4 * abs(value), 2.0**-10 * scale) + 2.0**-20 * abs(value)
