"""Follow named factors through what also takes one index of a factor, as a loop over experts does.

Contract
    A value has the indices of a factor all, in a dimension, or one, which `picks` names. Values of
    several indices that meet close the factor; those of all, joined in order, have it again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx as fx

from moe_compile.attention.head_factors import Dims, Factor, Lost, flat, regroup, unify
from moe_compile.attention.head_tracking import NO_SYMBOLS, Tracker, cut_dim
from moe_compile.attention.size_numbers import SizeNumbers

Picks = dict[Factor, int]
"""Factor -> the one index of it that a value was made from."""


class ExpertTracker(Tracker):
    """The factors of the values of one region, and the indices taken of them."""

    def __init__(self, numbers: SizeNumbers = NO_SYMBOLS) -> None:
        """Start with no value known; `numbers` stand for sizes that are symbols."""
        super().__init__(numbers)
        self._picks: dict[fx.Node, list[tuple[Factor, int]]] = {}
        self.products: list[tuple[fx.Node, list[Factor]]] = []
        """Operand from outside -> an index that it shares with the rows of a product, and that the
        product keeps."""
        self.weights: list[tuple[fx.Node, fx.Node]] = []
        """Product -> an operand of it from outside."""
        self.terms: dict[fx.Node, Dims] = {}
        """Loss -> the factors of the terms that it adds up."""

    def picks(self, node: fx.Node) -> Picks:
        """Return the indices that `node` was made from."""
        found: Picks = {}
        for given, index in self._picks.get(node, ()):
            for factor in flat([given]):
                if found.setdefault(factor, index) != index or flat([given]) != [factor]:
                    self.closed.append((node, [factor]))
        return found

    def pick(self, node: fx.Node, factor: Factor, index: int) -> None:
        """Note that `node` has one index of `factor`."""
        self._picks.setdefault(node, []).append((factor, index))

    def inherit(self, node: fx.Node, sources: Sequence[fx.Node]) -> None:
        """Give `node` the indices of what it reads."""
        self._picks[node] = [pair for source in sources for pair in self.picks(source).items()]
        self.picks(node)  # closes what meets here

    def common_picks(self, parts: Sequence[fx.Node]) -> tuple[Factor | None, Picks]:
        """Return the factor whose indices `parts` are, all in order, and what they share."""
        each = [self.picks(part) for part in parts]
        together = [
            factor
            for factor in each[0]
            if factor.size == len(parts)
            and [picks.get(factor) for picks in each] == list(range(len(parts)))
        ]
        joined = together[0] if together else None
        shared = [{f: i for f, i in picks.items() if f is not joined} for picks in each]
        for picks in shared[1:]:
            for factor in {*picks, *shared[0]}:
                if picks.get(factor) != shared[0].get(factor):
                    self.closed.append((parts[0], [factor]))
        return joined, shared[0]

    def join(self, node: fx.Node, parts: Sequence[fx.Node]) -> Factor | None:
        """Give `node` what its parts share, and return the factor that they make up."""
        joined, shared = self.common_picks(parts)
        self._picks[node] = list(shared.items())
        return joined

    def outer_of(self, cut: fx.Node) -> Factor | None:
        """Return the factor of which every piece of a split has one index, if there is one."""
        sizes = self.cut_sizes(cut)
        if len(sizes) < 2 or len({*sizes}) > 1:
            return None
        try:
            outer, _ = regroup(self.dims(cut)[cut_dim(cut)], [len(sizes), sizes[0]])
        except Lost:
            return None
        return outer[0] if len(outer) == 1 and not outer[0].pieces else None

    def piece(self, cut: fx.Node, index: int) -> Dims:
        """Return the factors of one piece of a split."""
        outer = self.outer_of(cut)
        if outer is None:
            return super().piece(cut, index)
        dims, along = self.dims(cut), cut_dim(cut)
        dims[along] = dims[along][1:]
        return dims

    def joined(self, node: fx.Node) -> Dims:
        """Return the factors of a concatenation of anything else."""
        return self._joined(node)

    def concatenated(self, node: fx.Node, parts: Sequence[fx.Node], along: int) -> Dims | None:
        """Return the factors of a concatenation of all indices of a factor, None for another."""
        joined = self.join(node, parts)
        if joined is None:
            return None
        dims = self.dims(parts[0])
        for part in parts[1:]:
            for first, other in zip(dims, self.dims(part), strict=True):
                unify(first, other)
        dims = self.dims(parts[0])
        dims[along] = [joined, *dims[along]]
        return dims
