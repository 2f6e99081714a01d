"""Trade heads for the rest of the sequence, and back, by one all-to-all each.

Contract
    `to_sequence` undoes `to_heads`. A compiler sees `_c10d_functional` collectives, and counts of
    heads that are read from tensors: the same nodes serve any subset of the heads.

Shapes: B batch, S the whole sequence, n ranks, H heads, D a head's size. Rank r of the group has
the r-th part of the sequence, and after `to_heads` the r-th H / n of the heads.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd


def to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `[B, H / n, S, D]` of `x` `[B, H, S / n, D]`."""
    by_receiver = x.unflatten(1, (group.size(), -1)).movedim(1, 0)
    by_part = _exchange(by_receiver, group)
    return by_part.movedim(0, 2).flatten(2, 3)


def to_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `[B, H, S / n, D]` of `x` `[B, H / n, S, D]`."""
    by_receiver = x.unflatten(2, (group.size(), -1)).movedim(2, 0)
    by_heads = _exchange(by_receiver, group)
    return by_heads.movedim(0, 1).flatten(1, 2)


def _exchange(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return what the ranks sent here; `rows[r]` goes to rank r, and comes from it."""
    return all_to_all_single_autograd(rows.contiguous(), None, None, group)
