"""A routed layer whose routing is stated beforehand: how many rows every expert gets.

Contract
    Every rank sends each expert exactly the share of its rows that the case says; the router
    computes as always, and finds what the tokens carry in their first columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from benchmarks.link.cases import Case
from benchmarks.link.subjects import Subject

CHOSEN: Final = 4.0
"""Logit of the first expert a token chooses; later ones have less, all others have 0."""


def rows_per_expert(weights: Sequence[float], tokens: int, top_k: int) -> list[int]:
    """Return how many of `tokens` x `top_k` rows go to each expert, in proportion to `weights`.

    What does not divide goes to the first; raises ValueError where an expert would get more rows
    than there are tokens.

    >>> rows_per_expert([2.0, 1.0, 1.0, 1.0], tokens=10, top_k=1)
    [4, 2, 2, 2]
    """
    rows = tokens * top_k
    counts = [int(rows * weight / sum(weights)) for weight in weights]
    for expert in range(rows - sum(counts)):
        counts[expert] += 1
    if max(counts) > tokens:
        raise ValueError(f"{max(counts)} rows of {tokens} tokens for one expert")
    return counts


def state_routing(subject: Subject, case: Case, weights: Sequence[float]) -> Subject:
    """Return `subject` with tokens and router such that experts get rows by `weights`."""
    counts = rows_per_expert(weights, case.tokens, case.top_k)
    expert_of_row = torch.repeat_interleave(torch.arange(case.experts), torch.tensor(counts))
    token_of_row = torch.arange(len(expert_of_row)) % case.tokens  # an expert's are consecutive
    with torch.no_grad():
        subject.module.router.zero_()
        subject.module.router[: case.experts].fill_diagonal_(1.0)
        subject.tokens[:, : case.experts] = 0.0
        rank_of_row = torch.arange(len(expert_of_row)) // case.tokens
        subject.tokens[token_of_row, expert_of_row] = (CHOSEN - rank_of_row / case.top_k).to(
            subject.tokens.dtype
        )
    return subject
