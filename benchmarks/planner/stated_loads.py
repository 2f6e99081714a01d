"""How many rows every expert gets under a stated popularity, and chunks of a rank's experts.

Contract
    Nothing is random but which expert is how popular, and that follows from a seed. Rows are
    expected numbers, in units of the rows that a rank has where all experts are as popular.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Final

Groups = tuple[tuple[int, ...], ...]
"""Local experts of each chunk, in the order in which chunks run."""
HOT: Final = 8.0
"""Times the mean that the one hot expert is chosen, at most by every token."""
ROUTINGS: Final = ("even", "Zipf 0.25", "Zipf 0.5", "Zipf 1", "one hot")


def chosen_shares(routing: str, num_experts: int, top_k: int, seed: int) -> list[float]:
    """Return the share of tokens that choose each expert; together `top_k`.

    >>> chosen_shares("even", 4, 2, seed=0)
    [0.5, 0.5, 0.5, 0.5]
    """
    mean = top_k / num_experts
    if routing == "one hot":
        hot = min(1.0, HOT * mean)
        shares = [hot] + [(top_k - hot) / (num_experts - 1)] * (num_experts - 1)
    else:
        power = 0.0 if routing == "even" else float(routing.split()[1])
        shares = _distinct([(i + 1) ** -power for i in range(num_experts)], top_k)
    random.Random(seed).shuffle(shares)
    return shares


def _distinct(weights: Sequence[float], top_k: int) -> list[float]:
    """Return how likely each is among `top_k` distinct ones, drawn by `weights`.

    It is drawn at a time of its own, exponential by its weight, and is among those where it comes
    before the time at which `top_k` have come on average.
    """
    if len(set(weights)) == 1:
        return [top_k / len(weights)] * len(weights)
    low, high = 0.0, 1e9
    for _ in range(200):
        time = (low + high) / 2
        come = [1 - math.exp(-time * weight) for weight in weights]
        low, high = (time, high) if sum(come) < top_k else (low, time)
    return come


def rows_of_ranks(shares: Sequence[float], num_ranks: int) -> list[list[float]]:
    """Return the rows of each rank's experts, in units of an even rank's."""
    local, mean = len(shares) // num_ranks, sum(shares) / num_ranks
    return [[share / mean for share in shares[rank * local :][:local]] for rank in range(num_ranks)]


def even_ranges(rows: Sequence[float], num: int) -> Groups:
    """Return ranges of as many experts each, as megamoe cuts them."""
    edges = [-(-c * len(rows) // num) for c in range(num + 1)]
    return _ranges(edges)


def ranges_by_load(rows: Sequence[float], num: int) -> Groups:
    """Return ranges of about as many rows each, at least one expert in each.

    An expert is in the chunk in which the middle of its rows lies.

    >>> ranges_by_load([4.0, 1.0, 1.0, 1.0], 2)
    ((0,), (1, 2, 3))
    """
    ends, local = list(itertools.accumulate(rows)), len(rows)
    middles = [2 * end - own for end, own in zip(ends, rows, strict=True)]
    edges = [0]
    for chunk in range(1, num):
        before = sum(middle * num < 2 * chunk * ends[-1] for middle in middles)
        edges.append(min(max(before, edges[-1] + 1), local - num + chunk))
    return _ranges([*edges, local])


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


def _ranges(edges: Sequence[int]) -> Groups:
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(edges))
