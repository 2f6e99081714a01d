"""All-gather and reduce-scatter with gradients, by the names this torch has for them.

Each is the other's gradient. Both work along dim 0: `gather(x, group)` returns the ranks' `x` one
after the other, `reduce_scatter(x, group)` this rank's part of the sum of the ranks' `x`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional


def _named(*names: str) -> Any:
    """Return the first of these functions that torch has: newer ones warn about older names."""
    return next(getattr(functional, name) for name in names if hasattr(functional, name))


_GATHER = _named("all_gather_single_autograd", "all_gather_tensor_autograd")
_REDUCE = _named("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd")


def gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `[n x rows, ...]` of `x` `[rows, ...]`."""
    gathered: torch.Tensor = _GATHER(x.contiguous(), 0, group)
    return gathered


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `[rows / n, ...]` of `x` `[rows, ...]`."""
    reduced: torch.Tensor = _REDUCE(x.contiguous(), "sum", 0, group)
    return reduced
