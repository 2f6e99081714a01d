"""One aten operator of a region's body, with the proof's values of its inputs.

Contract
    The value of a tensor is found by its identity, and forgotten where it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import sympy
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor

from moe_compile.dims.operators import product, rule_of
from moe_compile.dims.record import Operator
from moe_compile.graph.memory import storages_of
from moe_compile.journal.reasons import Left, Reason
from moe_compile.regions.count_facts import CountFacts
from moe_compile.regions.outside_reads import Reads, is_differentiable
from moe_compile.regions.row_domain import FROM_COUNTS, Fixed, Order, Outside, Value, length

SYMBOLIC: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)

SIZED: Final = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "expand"})
"""Operators whose numbers are sizes, not values or positions."""


@dataclass(frozen=True, slots=True)
class Claim:
    """After step `moment` of the trace, `tensor` holds the integers that `value` says."""

    moment: int
    tensor: torch.Tensor
    value: Value


@dataclass(slots=True)
class Knowledge:
    """The proof's knowledge so far."""

    facts: CountFacts
    reads: Reads = field(default_factory=Reads)
    made_stable: frozenset[fx.Node] = frozenset()
    """Sorts that are not stable, and are followed as if they were."""
    reordered: dict[fx.Node, None] = field(default_factory=dict)
    """Of these, those that order rows."""
    grouped: dict[fx.Node, str | None] = field(default_factory=dict)
    """Grouped GEMM -> why groups outside a chunk may have rows in it; None when they have none."""
    padding: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    """Grouped GEMM -> rows that the group of each expert has where the expert has none."""
    joins: list[fx.Node] = field(default_factory=list)
    """Concatenations along the rows, of tensors of one type and number of dimensions: where the
    only input is an empty vector, the result is one."""
    whole: dict[fx.Node, set[int]] = field(default_factory=dict)
    """Node that is not proven row by row -> the experts whose rows it reads."""
    searches: bool = False
    """Whether rows are found by a search for labels, whose result is as long as it finds."""
    has_spread: bool = False
    """Whether a table with an entry per expert met rows, those of an expert's padding too."""
    claims: list[Claim] = field(default_factory=list)
    moment: int = 0
    """The step of the trace that is followed."""
    _values: dict[int, tuple[torch.Tensor, Value | None]] = field(default_factory=dict)

    def set(self, tensor: torch.Tensor, value: Value) -> None:
        """Note the value of `tensor`, by identity."""
        self._values[id(tensor)] = (tensor, value)
        if isinstance(value, FROM_COUNTS):
            self.claims.append(Claim(self.moment, tensor, value))

    def forget_aliases(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Forget the values of all tensors that share memory with `tensor`, which is written.

        Return those of them that had a value.
        """
        memory, forgotten = storages_of(tensor), []
        for key, (other, value) in self._values.items():
            if storages_of(other) & memory:
                self._values[key] = (other, None)
                forgotten += [] if value is None else [other]
        return forgotten

    def is_forgotten(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` was written in a way not followed."""
        return id(tensor) in self._values and self._values[id(tensor)][1] is None

    def value(self, tensor: torch.Tensor) -> Value:
        """Return the value of `tensor`."""
        if id(tensor) in self._values:
            known = self._values[id(tensor)][1]
            if known is None:
                raise Left(
                    Reason.UNKNOWN_OPERATOR,
                    "a tensor is read after its memory was written through another view, which "
                    "the proof does not follow",
                )
            return known
        if isinstance(tensor, FakeTensor):
            raise Left(Reason.UNKNOWN_OPERATOR, "it is not known which operator made a tensor")
        return Fixed(values=tensor if is_small_integer(tensor) else None)


def functional(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the functional form of `func`; `func` itself where it writes nothing in place.

    None where there is no such operator, or `func` changes the form of a tensor in place.
    """
    if not func._schema.is_mutable:
        return func
    name = str(func._schema.name).removeprefix("aten::")
    if torch.Tag.inplace_view in func.tags or not name.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, func._overloadname, None)


@dataclass(frozen=True, slots=True)
class Call(Operator):
    """One operator, with the proof's knowledge where it runs."""

    known: Knowledge

    @property
    def facts(self) -> CountFacts:
        """The facts about the counts."""
        return self.known.facts

    @property
    def is_product(self) -> bool:
        """Whether the operator multiplies its last two inputs, matrices or batches of them."""
        return rule_of(self.func) is product

    def value(self, tensor: torch.Tensor) -> Value:
        """Return the value of an input."""
        return self.known.value(tensor)

    def shape(self, tensor: torch.Tensor) -> list[sympy.Expr]:
        """Return the sizes of `tensor` as formulas in the counts."""
        return [self.facts.formula(size) for size in tensor.shape]

    def reads_counts(self) -> bool:
        """Whether a number among the arguments may differ between chunks."""
        return any(self.facts.depends_on_counts(a) for a in self.leaves if isinstance(a, SYMBOLIC))

    def is_sized_by_counts(self) -> bool:
        """Whether a size of a tensor read or made depends on the counts, in any dimension."""
        tensors = (*self.inputs, *self.outputs)
        return any(self.facts.depends_on_counts(size) for t in tensors for size in t.shape)

    def note_read(
        self, outside: Outside, index: int | None, order: Order, *, is_summed: bool = False
    ) -> None:
        """Note that rows in `order` read slice `index` of `outside`, or all of it for None."""
        if any(map(is_differentiable, outside.nodes)):
            expert = self.expert_of(order)
            self.known.reads.add(outside, index, expert, is_summed=is_summed)

    def expert_of(self, order: Order) -> int | None:
        """Return the one expert of rows that a sum runs over; None when several.

        Refuses padding whose length depends on other experts' counts: such sums, in products and in
        gradients of tensors that rows read, round by the number of rows, padding included.
        """
        expert = self.facts.expert_of(order)
        if expert is not None and self.facts.experts_of(length(order)) - {expert}:
            detail = (
                f"the rounding of {self.name} depends on a padding whose length depends on other "
                "experts' counts"
            )
            raise Left(Reason.SHARED_PARAMETER, detail)
        return expert

    def unknown(self) -> Left:
        """Return the refusal of an operator that no rule covers."""
        return Left(Reason.UNKNOWN_OPERATOR, self.name)


Rule = Callable[[Call], Value | list[Value] | None]
"""Returns None where the general rules apply."""


def dim_of(dim: int, ndim: int) -> int:
    """Return `dim` counted from the left."""
    return dim + ndim if dim < 0 else dim


def is_small_integer(tensor: torch.Tensor) -> bool:
    """Whether `tensor` holds integers, few enough to be looked at one by one."""
    static = all(isinstance(size, int) for size in tensor.shape)
    number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return static and not number and tensor.numel() <= 1 << 12
