"""Emit numbers that stand for sizes as nodes that compute the sizes.

Contract
    Every number in the arguments of a call that is emitted here, and that a `SizeNumbers` has for
    a product with symbols, becomes that product of the graph's inputs. Nodes that are copied keep
    their arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx
from torch.fx.node import map_aggregate

from moe_compile.attention.size_numbers import SizeNumbers
from moe_compile.graph.edit import Emitter


class SizedEmitter(Emitter):
    """Appends nodes before `anchor`, whose sizes `numbers` stand for."""

    def __init__(self, anchor: fx.Node, numbers: SizeNumbers) -> None:
        """Emit before `anchor`, which stays."""
        super().__init__(anchor)
        self._numbers = numbers
        self._nodes: dict[int, fx.Node] = dict(numbers.inputs)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of a function or operator."""
        return super().call(target, *self._sized(args), **self._sized(kwargs))

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of the tensor method `name`; the tensor is the first argument."""
        return super().method(name, *self._sized(args), **self._sized(kwargs))

    def instead(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of a function or operator in the place of `node`."""
        return super().instead(node, target, *self._sized(args), **self._sized(kwargs))

    def divide(self, whole: int, shares: Sequence[int]) -> None:
        """Emit the sizes of parts of `whole`, for which `shares` stand: larger ones first."""
        for i, share in enumerate(shares):
            if self._numbers.factors(share)[1] and share not in self._nodes:
                more = self.call(operator.add, whole, len(shares) - 1 - i)
                self._nodes[share] = self.call(operator.floordiv, more, len(shares))

    def ratio(self, part: int, whole: int) -> Any:
        """Return how much of `whole` a part is, or emit it."""
        if any(self._numbers.factors(number)[1] for number in (part, whole)):
            return self.call(operator.truediv, part, whole)
        return part / whole

    def _sized(self, arguments: Any) -> Any:
        return map_aggregate(arguments, self._size)

    def _size(self, argument: Any) -> Any:
        """Return the node that computes the size which `argument` stands for; else `argument`."""
        if type(argument) is not int or argument in self._nodes:
            return self._nodes.get(argument, argument)
        number, symbols = self._numbers.factors(argument)
        if not symbols:
            return argument
        *outer, last = (self._nodes[one] for one in symbols)
        for one in outer:
            last = super().call(operator.mul, one, last)
        self._nodes[argument] = super().call(operator.mul, number, last) if number != 1 else last
        return self._nodes[argument]
