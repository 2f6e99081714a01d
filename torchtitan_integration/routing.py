"""Rows per expert, read from torchtitan's own counters at the end of a step.

Contract
    One small copy per optimizer step on the model's device, no synchronisation: the numbers are
    looked at when metrics are logged. torchtitan counts every routed row of its rank's tokens, and
    sets the counters to zero when it steps; the copy is taken before that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


class RoutingCounter:
    """Keeps the rows per expert of the last step, `[layers, experts]`, of one rank's tokens."""

    def __init__(self) -> None:
        """Start without a model; `watch` names it."""
        self.rows: torch.Tensor | None = None
        self._seconds = 0.0
        self._optimizers: Any = None
        self._blocks: list[nn.Module] = []
        self._hook: Any = None

    def watch(self, optimizers: Any, parts: Sequence[nn.Module]) -> None:
        """Count for the model `parts` that `optimizers` steps."""
        blocks = [block for part in parts for block in part.layers.values()]
        self._blocks = [block for block in blocks if getattr(block, "moe_enabled", False)]
        self._optimizers = optimizers
        if self._hook is None and self._blocks:  # hooks of all optimizers run before one's own
            self._hook = register_optimizer_step_pre_hook(self._before_step)

    def take_seconds(self) -> float:
        """Return the time spent counting since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """Stop counting."""
        if self._hook is not None:
            self._hook.remove()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if optimizer is self._optimizers:
            began = time.perf_counter()
            self.rows = torch.stack([_counted(block) for block in self._blocks])
            self._seconds += time.perf_counter() - began


def _counted(block: nn.Module) -> torch.Tensor:
    """Return the counter; halved where checkpointing runs the router twice, as torchtitan does."""
    rows: torch.Tensor = block.moe.tokens_per_expert
    return rows / 2 if getattr(block, "checkpoint_impl", None) is not None else rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Imbalance:
    """How unevenly rows fell, 1.0 being even; of all ranks' tokens."""

    experts: float
    """Rows of the busiest expert over the mean, averaged over layers."""
    experts_worst_layer: float
    ranks: float
    """Rows of the busiest EP rank over the mean, averaged over layers."""
    ranks_worst_layer: float


def imbalance(rows: torch.Tensor, ep_degree: int, group: dist.ProcessGroup | None) -> Imbalance:
    """Return the imbalance of `rows` `[layers, experts]`, summed over the ranks of `group`.

    A collective: every rank of `group` calls it, or none.
    """
    total = rows.to(torch.float64)  # a copy: counts of a long step are exact
    if group is not None:
        dist.all_reduce(total, group=group)
    of_ranks = total.view(total.shape[0], ep_degree, -1).sum(2)
    experts, ranks = (_max_over_mean(x) for x in (total, of_ranks))
    return Imbalance(
        experts=float(experts.mean()),
        experts_worst_layer=float(experts.max()),
        ranks=float(ranks.mean()),
        ranks_worst_layer=float(ranks.max()),
    )


def _max_over_mean(rows: torch.Tensor) -> torch.Tensor:
    return rows.max(1).values / rows.mean(1).clamp_min(1.0)


def rows_to_others(rows: torch.Tensor, ep_degree: int, ep_rank: int, tp_degree: int) -> float:
    """Return how many of `rows` `[layers, experts]` one rank sends to other ranks.

    The ranks of a TP group count the same tokens, and each dispatches its share of them.
    """
    by_rank = rows.to(torch.float64).view(rows.shape[0], ep_degree, -1).sum((0, 2))
    return float(by_rank.sum() - by_rank[ep_rank]) / tp_degree
