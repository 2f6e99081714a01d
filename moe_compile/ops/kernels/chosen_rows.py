"""Where a row lies whose rows stand in several matrices, one after another."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_at(
    rows: tl.tuple,  # each [.., WIDTH]
    starts: tl.tuple,  # the number of the first row of each but the first
    place: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Return a pointer to the first element of row `place` of all."""
    source = rows[0]
    first = place * 0
    for matrix in tl.static_range(1, len(rows)):
        is_later = place >= starts[matrix - 1]
        source = tl.where(is_later, rows[matrix], source)
        first = tl.where(is_later, starts[matrix - 1], first)
    return source + (place - first) * WIDTH
