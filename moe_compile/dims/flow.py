"""The factors of the tensors that one node makes on its way, and one operator among them.

Contract
    Tensors are told apart by identity. One without a known source has factors of its own. A tensor
    has all indices of a factor, in a dimension, or one, which its picks name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from moe_compile.dims.factors import Dims, Factor, Lost, SizeNumbers, flat, holds, size_of, unify
from moe_compile.dims.record import Operator
from moe_compile.graph.memory import storages_of
from moe_compile.graph.query import operator_at

Picks = dict[Factor, int]
"""Factor -> the one index of it that a value was made from."""
Picked = list[tuple[Factor, int]]
"""Picks as they were noted: factors may have been split since."""
Each = tuple[Dims | None, ...]
"""The factors of every result; None of one that is not followed."""


class Notes:
    """Effects of operators on factors, as found so far."""

    def __init__(self) -> None:
        """Start with nothing found."""
        self.closed: list[tuple[fx.Node, list[Factor]]] = []
        """Node -> a dimension whose indices it does not treat apart."""
        self.products: list[tuple[fx.Node, list[Factor]]] = []
        """Operand from outside -> an index that it shares with the rows of a product, and that the
        product keeps."""
        self.weights: list[tuple[fx.Node, fx.Node]] = []
        """Product -> an operand of it from outside."""

    def settled(self, node: fx.Node, picked: Picked) -> Picks:
        """Return the indices that were noted; closes factors of which several meet."""
        found: Picks = {}
        for given, index in picked:
            for factor in flat([given]):
                if found.setdefault(factor, index) != index or flat([given]) != [factor]:
                    self.closed.append((node, [factor]))
        return found


@dataclass(slots=True)
class Followed:
    """A tensor, with its factors and picks."""

    tensor: torch.Tensor
    """Kept, so that its identity stays its own."""
    dims: Dims | None
    picked: Picked = field(default_factory=list)
    origin: fx.Node | None = None
    """The node at which tracking began, if the tensor is its value or another form of it."""


class Flow:
    """The tensors that one node makes on its way."""

    def __init__(self, node: fx.Node, numbers: SizeNumbers, notes: Notes) -> None:
        """Note in `notes` what the operators of `node` do to factors."""
        self.node, self.notes, self._numbers = node, notes, numbers
        self._known: dict[int, Followed] = {}
        self._origins: dict[fx.Node, Followed] = {}
        self.whole_of: dict[int, Followed] = {}
        """Identity of a piece -> the tensor that was cut into it and others."""

    def give(self, known: Followed) -> None:
        """Set the factors of a tensor that the node reads."""
        self.put(known)
        if known.origin is not None:
            self._origins[known.origin] = known

    def factors_of(self, origin: fx.Node) -> list[Factor]:
        """Return the factors of a node at which tracking began."""
        return [factor for dim in self._origins[origin].dims or () for factor in flat(dim)]

    def put(self, known: Followed) -> None:
        """Set the factors of a tensor; raises Lost unless its sizes agree."""
        dims = known.dims
        if dims is not None and [size_of(dim) for dim in dims] != self.sizes(known.tensor):
            raise self.lost("has sizes that differ from those that megamoe's rule for it gives")
        self._known[id(known.tensor)] = known

    def of(self, tensor: torch.Tensor) -> Followed:
        """Return a tensor with its factors; new ones if it was not met yet."""
        if id(tensor) not in self._known:
            self.put(Followed(tensor, [[Factor(size)] for size in self.sizes(tensor)]))
        return self._known[id(tensor)]

    def dims(self, tensor: torch.Tensor) -> Dims:
        """Return the factors of a tensor; raises Lost where it is not followed."""
        dims = self.of(tensor).dims
        if dims is None:
            raise self.lost("reads a tensor whose dimensions could not be traced")
        return [flat(dim) for dim in dims]

    def sizes(self, tensor: torch.Tensor) -> list[int]:
        """Return the sizes of a tensor, or the numbers that stand for them."""
        return [self._numbers.product_of(size) for size in tensor.shape]

    def close(self, dims: Iterable[list[Factor]]) -> None:
        """Note dimensions whose indices are not treated apart."""
        self.notes.closed += [(self.node, dim) for dim in dims]

    def write(self, written: Followed) -> None:
        """Close factors of a tensor written through a view that others of its memory lack."""
        memory = storages_of(written.tensor)
        for other in [*self._known.values()]:
            if other is not written and storages_of(other.tensor) & memory:
                given = [*(written.dims or ()), *([factor] for factor, _ in written.picked)]
                own = [factor for dim in given for factor in flat(dim)]
                self.close([f] for f in own if not any(holds(d, f) for d in other.dims or ()))

    def lost(self, why: str) -> Lost:
        """Return the error that factors are not followed through the node."""
        return Lost(f"{operator_at(self.node)} {why}")


@dataclass(frozen=True, slots=True)
class Call(Operator):
    """One operator, with the factors of its inputs."""

    flow: Flow
    picked: list[Picked]
    """For each result, the indices that it was made from: those of all inputs, unless a rule
    changes them."""

    def dims(self, tensor: torch.Tensor | None = None) -> Dims:
        """Return the factors of an input; of the first tensor where none is named."""
        return self.flow.dims(self.inputs[0] if tensor is None else tensor)

    def sizes(self, number: int = 0) -> list[int]:
        """Return the sizes of a result."""
        return self.flow.sizes(self.outputs[number])

    def close(self, *dims: list[Factor]) -> None:
        """Note dimensions whose indices come together, or change places."""
        self.flow.close(dims)

    def cuts(self) -> None:
        """Note that the results are pieces of the first tensor."""
        self.flow.whole_of |= {id(one): self.flow.of(self.inputs[0]) for one in self.outputs}

    def lost(self, why: str) -> Lost:
        """Return the error that factors are not followed through the call."""
        return self.flow.lost(why)

    def named(self, num_dims: int) -> list[int]:
        """Return the dimensions that the call names, from the left; all where it names none."""
        names = (self.argument(name) for name in ("dim", "dims", "dimension"))
        given = next((one for one in names if one is not None and one != []), None)
        if given is None:
            return list(range(num_dims))
        several = given if isinstance(given, list | tuple) else [given]
        return [self.from_left(d, num_dims) for d in several]

    def from_left(self, dim: Any, num_dims: int) -> int:
        """Return a dimension counted from the left."""
        if not isinstance(dim, int):
            raise self.lost(
                "works along a dimension that must be known at compile time, and is not"
            )
        return dim % max(num_dims, 1)

    def meeting(self, left: list[Factor], right: list[Factor]) -> list[Factor]:
        """Return the factors of a dimension that two tensors share, one broadcast perhaps.

        Where these are no products of the same factors, the dimension gets a factor of its own.
        """
        left, right = flat(left), flat(right)
        if not left or not right:
            return left or right
        try:
            unify(left, right)
        except Lost:
            self.close(left, right)
            return [Factor(size_of(left))]
        return flat(left)


Rule = Callable[[Call], Dims | Each]


def common_picks(notes: Notes, node: fx.Node, each: Sequence[Picks]) -> tuple[Factor | None, Picks]:
    """Return the factor whose indices `each` are, all in order, and the picks that they share."""
    together = [
        factor
        for factor in each[0]
        if factor.size == len(each) and [p.get(factor) for p in each] == list(range(len(each)))
    ]
    joined = together[0] if together else None
    shared = [{f: i for f, i in picks.items() if f is not joined} for picks in each]
    for picks in shared[1:]:
        for factor in {*picks, *shared[0]}:
            if picks.get(factor) != shared[0].get(factor):
                notes.closed.append((node, [factor]))
    return joined, shared[0]
