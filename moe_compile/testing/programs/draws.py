"""Small hypothesis strategies that draw choices of the grammar.

Contract
    A choice is its plainest more often than any other, so that programs with few features are
    common.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

Choice = TypeVar("Choice", bound=enum.Enum)


def mostly(members: Iterable[Choice], plain_of: int = 2) -> st.SearchStrategy[Choice]:
    """Draw one of `members`, the first in `1 / plain_of` of the draws or more."""
    drawn: Sequence[Choice] = list(members)
    return st.sampled_from([drawn[0]] * (len(drawn) // plain_of) + [*drawn])


def few(kind: Iterable[Choice], most: int) -> st.SearchStrategy[frozenset[Choice]]:
    """Draw none or up to `most` of `kind`."""
    drawn: st.SearchStrategy[Any] = st.sampled_from(list(kind))
    some = st.frozensets(drawn, min_size=1, max_size=most)
    return st.one_of(st.just(frozenset()), some, some)
