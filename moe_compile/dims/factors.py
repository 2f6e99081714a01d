"""Named factors whose products are the dimensions of a tensor, through views and moves.

Contract
    A dimension is a list of factors, outer first; a factor that is split, or found to be the same
    as others, is split or renamed wherever it was mentioned before.
    An operator that cannot be followed raises Lost; nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


class Lost(Exception):
    """The factors of a value cannot be told."""


@dataclass(eq=False, slots=True)
class Factor:
    """One factor of a dimension; compared by identity."""

    size: int
    parts: list[Factor] | None = None
    """Factors that it was found to consist of, outer first; None while it is whole."""
    pieces: tuple[list[Factor], ...] = ()
    """For a concatenation: the factors of every piece."""

    def split(self, outer: int) -> list[Factor]:
        """Cut into `outer` and the rest, here and wherever it is mentioned."""
        if self.pieces:
            raise Lost("a view cuts a dimension inside a piece of a concatenation")
        self.parts = [Factor(outer), Factor(self.size // outer)]
        return self.parts


Dims = list[list[Factor]]


def flat(factors: Sequence[Factor]) -> list[Factor]:
    """Return the whole factors that `factors` consist of today, without those of size one."""
    found: list[Factor] = []
    for factor in factors:
        if factor.parts is not None:
            found += flat(factor.parts)
        elif factor.size > 1:
            found.append(factor)
    return found


def size_of(factors: Sequence[Factor]) -> int:
    """Return the size of a dimension."""
    return math.prod(factor.size for factor in factors)


def regroup(factors: Sequence[Factor], sizes: Sequence[int]) -> Dims:
    """Return `factors` dealt out, in order, to dimensions of `sizes`."""
    todo, dims = flat(factors), []
    for size in sizes:
        dim: list[Factor] = []
        left = size
        while left > 1:
            if not todo:
                raise Lost("a view has other sizes than its input")
            factor = todo.pop(0)
            if left % factor.size == 0:
                dim.append(factor)
                left //= factor.size
            elif factor.size % left == 0:
                outer, inner = factor.split(left)
                dim.append(outer)
                todo = flat([inner, *todo])  # the same factor may stand further on
                left = 1
            else:
                raise Lost("a view cuts a dimension that it should keep whole")
        dims.append(dim)
    if todo:
        raise Lost("a view has other sizes than its input")
    return dims


def unify(left: Sequence[Factor], right: Sequence[Factor], *, prefix: bool = False) -> None:
    """Make the same indices of two dimensions the same factors.

    With `prefix` the right one may have more factors, inside those of the left one.
    """
    a, b = flat(left), flat(right)
    while a and b:
        if a[0] is not b[0]:
            common = math.gcd(a[0].size, b[0].size)
            if common not in (a[0].size, b[0].size):
                raise Lost("two dimensions cannot be divided into the same factors")
            for factor in (a[0], b[0]):
                if factor.size != common:
                    factor.split(common)
            a, b = flat(a), flat(b)
            if a[0].pieces or b[0].pieces:
                raise Lost("a concatenated dimension is combined with another dimension")
            b[0].parts = [a[0]]
            a, b = flat(a), flat(b)  # a renamed factor may stand further on too, in both
        a.pop(0)
        b.pop(0)
    if a or (b and not prefix):
        raise Lost("two dimensions differ in size")


def holds(factors: Sequence[Factor], head: Factor) -> bool:
    """Whether `head` is among `factors`, inside concatenations too."""
    return any(
        factor is head or any(holds(piece, head) for piece in factor.pieces)
        for factor in flat(factors)
    )


def group_size(factors: Sequence[Factor], head: Factor, share: int) -> int:
    """Return the size of a dimension in a group that has `share` of the indices of `head`."""
    size = 1
    for factor in flat(factors):
        if factor.pieces:
            size *= sum(group_size(piece, head, share) for piece in factor.pieces)
        else:
            size *= share if factor is head else factor.size
    return size
