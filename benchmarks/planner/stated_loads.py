"""Stated routings by name, and chunks of a rank's experts that are no ranges in their order.

Contract
    As `moe_compile/plan/uneven_price.py`, which the planner itself takes its rows from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from moe_compile.plan.uneven_price import Groups, shuffled, skewed_shares

HOT: Final = 8.0
"""Times the mean that the one hot expert is chosen, at most by every token."""
ROUTINGS: Final = ("even", "Zipf 0.25", "Zipf 0.5", "Zipf 1", "one hot")


def chosen_shares(routing: str, num_experts: int, top_k: int, seed: int) -> list[float]:
    """Return the share of tokens that choose each expert; together `top_k`."""
    if routing != "one hot":
        skew = 0.0 if routing == "even" else float(routing.split()[1])
        return skewed_shares(skew, num_experts, top_k, seed)
    hot = min(1.0, HOT * top_k / num_experts)
    return shuffled([hot] + [(top_k - hot) / (num_experts - 1)] * (num_experts - 1), seed)


def any_groups(rows: Sequence[float], num: int) -> Groups:
    """Return groups of any experts, the expert with most rows first to the emptiest."""
    groups: list[list[int]] = [[] for _ in range(num)]
    for expert in sorted(range(len(rows)), key=lambda e: -rows[e]):
        min(groups, key=lambda group: sum(rows[e] for e in group)).append(expert)
    return tuple(map(tuple, groups))


def ordered(by: Callable[[Sequence[float], int], Groups], order: str) -> Callable[..., Groups]:
    """Return what groups as `by` does and then orders chunks: by rows, or small ones outside."""

    def group(rows: Sequence[float], num: int) -> Groups:
        groups = sorted(by(rows, num), key=lambda g: -sum(rows[e] for e in g))
        if order == "smallest first":
            groups.reverse()
        elif order == "largest inside":
            groups = [*reversed(groups[0::2]), *groups[1::2]]
        return tuple(groups)

    return group
