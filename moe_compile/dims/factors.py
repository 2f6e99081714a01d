"""Named factors whose products are the dimensions of a tensor, and numbers that stand for symbols.

Contract
    A dimension is a list of factors, outer first; a factor that is split, or found to be the same
    as others, is split or renamed wherever it was mentioned before, through views and moves.
    An operator that cannot be followed raises Lost; nothing is guessed.
    Factors of sizes that are numbers and of sizes that are symbols are followed alike: a symbol
    stands as a prime above every size that memory can hold. Products of numbers and symbols are
    then equal, and divide one another, for all values of the symbols if and only if the numbers do
    that stand for them. A size that is no such product, or of a symbol that may be 0 or 1, for
    which dimensions are broadcast, raises Lost.

Worked example, s sequences of 4 positions, P the prime for s: a view of `[s * 4, D]` as `[s, 4, D]`
is one of `[P * 4, D]` as `[P, 4, D]`, which cuts `P * 4` into `P` and 4; as `[4, s, D]` it is one
as `[4, P, D]`, which cuts across them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sympy
import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from moe_compile.graph.query import expression_of, number_of, value_of, where_equal

FIRST: Final = 2**61
"""Primes are above it: no tensor has so many elements."""


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
            raise Lost(
                "a view must not cut a concatenated dimension inside one of its pieces, and "
                "one does"
            )
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
                raise Lost("a view must have as many elements as its input, and has not")
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
                raise Lost(
                    "a view must keep a dimension whole or cut it at a divisor of its size, and "
                    "one does neither"
                )
        dims.append(dim)
    if todo:
        raise Lost("a view must have as many elements as its input, and has not")
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
                raise Lost(
                    "two dimensions that are combined must be divisible into the same "
                    "factors, and are not"
                )
            for factor in (a[0], b[0]):
                if factor.size != common:
                    factor.split(common)
            a, b = flat(a), flat(b)
            if a[0].pieces or b[0].pieces:
                raise Lost(
                    "a concatenated dimension is combined with another dimension, which "
                    "megamoe does not follow"
                )
            b[0].parts = [a[0]]
            a, b = flat(a), flat(b)  # a renamed factor may stand further on too, in both
        a.pop(0)
        b.pop(0)
    if a or (b and not prefix):
        raise Lost("two dimensions that are combined differ in size")


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


class SizeNumbers:
    """The numbers that stand for the symbols of one graph; without a graph there are none."""

    def __init__(
        self, graph: fx.Graph | None = None, same: Mapping[Any, Any] | None = None
    ) -> None:
        """Take the symbols that inputs of `graph` are, and sizes that are the `same` as others."""
        self._same = dict(same or {})
        self._stands_for: dict[int, torch.SymInt] = {}
        self._number_of: dict[sympy.Expr, int] = {}
        self.inputs: dict[int, fx.Node] = {}
        """Number that stands for a symbol -> the input of the graph that is the symbol."""
        places = graph.find_nodes(op="placeholder") if graph is not None else ()
        given = [node for node in places if isinstance(value_of(node), torch.SymInt)]
        self._are_sizes_told = bool(given)
        for node in given:
            value = value_of(node)
            if number_of(value) is None and statically_known_true(value >= 2):
                self.inputs.setdefault(self.number_of(value), node)

    def number_of(self, size: Any) -> int:
        """Return the number that stands for a size, a prime of its own if it is an expression."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        return self.number_for(expression_of(size), size)

    def number_for(self, formula: sympy.Expr, size: Any) -> int:
        """Return the prime that stands for sizes of this formula, of which `size` is one."""
        if formula not in self._number_of:
            number = int(sympy.nextprime(max(self._stands_for, default=FIRST)))
            self._number_of[formula] = number
            self._stands_for[number] = size
        return self._number_of[formula]

    def product_of(self, size: Any) -> int:
        """Return the number that stands for a size; Lost unless a product of numbers and inputs."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        product, number = expression_of(size), 1
        for length, other in self._same.items():
            product = where_equal(product, length, other)
        for factor, power in product.as_powers_dict().items():
            if factor.is_Integer and power.is_Integer and power > 0:
                number *= int(factor) ** int(power)
            elif self._number_of.get(factor) in self.inputs and power.is_Integer and power > 0:
                number *= self._number_of[factor] ** int(power)
            else:
                raise Lost(
                    "sizes must be known at compile time or be products of the inputs' "
                    "sizes, and one is not"
                )
        return number

    def factors(self, number: int) -> tuple[int, list[int]]:
        """Return the number, and the numbers for symbols, whose product `number` is."""
        symbols = []
        for one in self._stands_for:
            while number and number % one == 0:
                symbols.append(one)
                number //= one
        return number, symbols

    def size(self, number: int) -> Any:
        """Return the size that a number stands for: itself, or an integer of the tracer's."""
        rest, symbols = self.factors(number)
        return math.prod([self._stands_for[one] for one in symbols], start=rest)

    def tells_sizes(self, node: fx.Node) -> bool:
        """Whether the value of `node` is made of numbers and sizes of inputs alone."""
        value = value_of(node)
        leaves = list(value) if isinstance(value, list | tuple) else [value]
        if not self._are_sizes_told or not leaves or not all(_is_integer(leaf) for leaf in leaves):
            return False
        symbols = {s for leaf in leaves for s in getattr(expression_of(leaf), "free_symbols", ())}
        return all(self._number_of.get(symbol) in self.inputs for symbol in symbols)


def _is_integer(value: Any) -> bool:
    return isinstance(value, torch.SymInt) or type(value) is int
