"""Numbers that stand for sizes which are symbols: factors of either kind are followed alike.

Contract
    A symbol stands as a prime above every size that memory can hold. Products of numbers and
    symbols are then equal, and divide one another, for all values of the symbols if and only if
    the numbers do that stand for them. A size that is no such product, or of a symbol that may be
    0 or 1, for which dimensions are broadcast, raises Lost.

Worked example, s sequences of 4 positions, P the prime for s: a view of `[s * 4, D]` as `[s, 4, D]`
is one of `[P * 4, D]` as `[P, 4, D]`, which cuts `P * 4` into `P` and 4; as `[4, s, D]` it is one
as `[4, P, D]`, which cuts across them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import sympy
import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from moe_compile.dims.factors import Lost
from moe_compile.graph.query import expression_of, number_of, value_of, where_equal

FIRST: Final = 2**61
"""Primes are above it: no tensor has so many elements."""


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
                raise Lost("a size is not known at compile time")
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
