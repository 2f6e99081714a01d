"""Where a row lies whose rows stand in several matrices, one after another.

Contract
    A kernel that calls `row_at` is compiled once for any numbers of rows, which change with every
    step. Of a number in a tuple that is 1, or divisible by 16, Triton makes a kernel of its own,
    whatever `do_not_specialize` says: starts are given as `4 * start + 3`, which is neither.
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
