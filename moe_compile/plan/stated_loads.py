"""How many rows every expert gets under a stated popularity, and ranges of a rank's experts.

Contract
    Nothing is random but which expert is how popular, and that follows from a seed alone: the same
    on every rank. Rows are expected numbers, in units of the rows that a rank has where all experts
    are as popular.

Pseudo-code
    popularity[i] = (i + 1) ** -skew, shuffled by the seed
    share[e] = how likely e is among the distinct experts of a token, drawn by popularity
    rows[r][e] = share over the mean rank's, experts rank-major
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

Groups = tuple[tuple[int, ...], ...]
"""Local experts of each chunk, in the order in which chunks run."""


def skewed_shares(skew: float, num_experts: int, top_k: int, seed: int) -> list[float]:
    """Return the share of tokens that choose each expert; together `top_k`.

    >>> skewed_shares(0.0, 4, 2, seed=0)
    [0.5, 0.5, 0.5, 0.5]
    """
    weights = [float(i + 1) ** -skew for i in range(num_experts)]
    return shuffled(_distinct(weights, top_k), seed)


def shuffled(shares: Sequence[float], seed: int) -> list[float]:
    """Return `shares` in an order that the seed alone says."""
    found = list(shares)
    random.Random(seed).shuffle(found)
    return found


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


def _ranges(edges: Sequence[int]) -> Groups:
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(edges))
