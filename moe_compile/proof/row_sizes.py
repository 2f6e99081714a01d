"""Whether the sizes of a tensor agree with what the proof takes it for.

Contract
    A size that the tracer gave a symbol of its own is named by what the proof knows.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_compile.journal.reasons import Reason
from moe_compile.regions.count_facts import CountFacts
from moe_compile.regions.row_domain import (
    Labels,
    Order,
    Permutation,
    Places,
    Rows,
    Unproven,
    Value,
    Wide,
    length,
)


def checked(facts: CountFacts, tensor: torch.Tensor, value: Value) -> Value:
    """Return `value` when the sizes agree with it: all known, one of them that of the order."""
    if isinstance(value, Rows):
        others = (*tensor.shape[: value.dim], *tensor.shape[value.dim + 1 :])
        if any(facts.depends_on_counts(other) for other in others):
            raise Unproven(Reason.SIZE_FROM_COUNTS, f"shape {list(tensor.shape)}")
        if value.dim == 0 and is_channels_last(tensor):
            raise Unproven(Reason.UNKNOWN_OPERATOR, "rows are laid out channels last")
    sized = _sized(tensor, value)
    if sized is None:
        return value
    size, order = sized
    if facts.is_unknown(size):
        facts.read_on_host(size, length(order))
    if facts.formula(size) != length(order):
        raise Unproven(Reason.ROWS_MIXED, f"{size} rows are not the {length(order)} expected")
    return value


def is_channels_last(rows: torch.Tensor) -> bool:
    """Whether torch may find `rows`, outermost, to be laid out with the channels last.

    It does not where there is no row, and so lays out what it makes of them in another way.
    """
    if rows.dim() not in (4, 5):
        return False
    channels, stride = rows.shape[1], rows.stride()
    return bool(channels != 1 and stride[-1] >= stride[1] * channels)


def _sized(tensor: torch.Tensor, value: Value) -> tuple[Any, Order] | None:
    """Return the size that is the number of rows of an order, and the order; None without one."""
    if isinstance(value, Wide):
        return _sized(tensor, value.index)
    if isinstance(value, Rows):
        return tensor.shape[value.dim], value.order
    if isinstance(value, Labels):
        return tensor.shape[0], value.order
    if isinstance(value, Permutation):
        return tensor.shape[0], value.source
    return (tensor.shape[0], value.target) if isinstance(value, Places) else None
