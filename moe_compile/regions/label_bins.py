"""Bins of a histogram that labels fall into: whether `histc` of labels counts them.

Contract
    An answer holds on every device: bins are computed exactly, as CUDA does for integers this
    small, and for floating-point labels the operator itself on a CPU must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

EXACT_BELOW: Final = 1 << 22
"""Bound of label times bins below which a float32 quotient rounds to no other whole number."""
FLOATS: Final = (torch.float32, torch.float64)
INTEGERS: Final = (torch.int32, torch.int64)


def bins_of(
    labels: Sequence[int], dtype: torch.dtype, bins: Any, least: Any, most: Any
) -> tuple[int | None, ...] | None:
    """Return the bin of each label, None for one outside all of them; None where it is not known.

    `bins`, `least` and `most` are those of `torch.histc`, which is given the labels as `dtype`.
    """
    if dtype not in (*FLOATS, *INTEGERS) or not all(map(_is_whole, (bins, least, most))):
        return None
    if bins < 1 or least >= most:  # where both are equal the labels themselves set the bounds
        return None
    if any(abs(label - least) * bins >= EXACT_BELOW for label in labels):
        return None
    exact = tuple(_bin(label, bins, int(least), int(most)) for label in labels)
    if dtype in FLOATS:
        computed = [_by_operator(label, dtype, bins, least, most) for label in labels]
        if computed != [None if b is None else [b] for b in exact]:
            return None
    return exact


def _is_whole(number: Any) -> bool:
    return type(number) in (int, float) and number == int(number)


def _bin(label: int, bins: int, least: int, most: int) -> int | None:
    if not least <= label <= most:
        return None
    return min((label - least) * bins // (most - least), bins - 1)


def _by_operator(
    label: int, dtype: torch.dtype, bins: int, least: float, most: float
) -> list[int] | None:
    """Return the bins that a CPU counts a label in."""
    value = torch.tensor([label], dtype=dtype, device="cpu")
    return torch.histc(value, bins, least, most).nonzero().flatten().tolist() or None
