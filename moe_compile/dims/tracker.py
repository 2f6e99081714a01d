"""Follow the factors of tensors through the operators that only move data.

Contract
    `is_movement` names the operators followed; every other one ends a path, or raises Lost.
    Sizes are numbers, or what stands for products of symbols; any other raises Lost.

Follow named factors through what also takes one index of a factor, as a loop over experts does.
A value has the indices of a factor all, in a dimension, or one, which `picks` names. Values of
several indices that meet close the factor; those of all, joined in order, have it again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.dims.arguments import (
    PARAMETERS,
    argument,
    dim_of,
    from_left,
    joined,
    moved,
)
from moe_compile.dims.factors import Dims, Factor, Lost, flat, regroup, size_of, unify
from moe_compile.dims.sizes import SizeNumbers
from moe_compile.graph.query import (
    input_splits,
    is_all_to_all,
    is_wait,
    operator_at,
    output_splits,
    tensor_of,
    value_of,
)

FORMS: Final = frozenset(
    {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"}
)
"""Operators that regroup dimensions in order: the sizes of the result say how."""

COPIES: Final = frozenset({"contiguous", "clone"})
SWAPS: Final = frozenset({"transpose", "swapaxes"})
SHIFTS: Final = frozenset({"movedim", "moveaxis"})
CUTS: Final = frozenset({"split", "chunk"})
OTHERS: Final = frozenset({"permute", "expand", "repeat_interleave", "cat"})
NO_SYMBOLS: Final = SizeNumbers()


def move_name(node: fx.Node) -> str:
    """Return the name of an operator of PyTorch, as a method or a function; "" for another."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverloadPacket):
        return ""
    target: Any = node.target
    name = getattr(target, "__name__", "")
    known = (getattr(torch, name, None), getattr(torch.functional, name, None))
    return name if any(target is found for found in known if found) else ""


def is_even_exchange(node: fx.Node) -> bool:
    """Whether the node is an all-to-all that gives every rank as many rows, known beforehand."""
    if not is_all_to_all(node):
        return False
    sizes = [*output_splits(node), *input_splits(node)]
    return bool(sizes) and all(isinstance(s, int) and s == sizes[0] for s in sizes)


def is_movement(node: fx.Node) -> bool:
    """Whether the node moves data, within a rank or by an even exchange, and nothing else."""
    if is_wait(node):
        source = node.all_input_nodes[0]
        return is_wait(source) or is_all_to_all(source)
    if node.target is operator.getitem:
        source = node.all_input_nodes[0]
        return move_name(source) in CUTS and isinstance(node.args[1], int)
    if is_form(node):
        return _keeps_type(node)
    return is_all_to_all(node) or move_name(node) in COPIES | SWAPS | SHIFTS | CUTS | OTHERS


def _keeps_type(form: fx.Node) -> bool:
    """Whether elements stay what they are: `x.view(dtype)` makes others of the same bytes."""
    made, given = tensor_of(form), tensor_of(form.all_input_nodes[0])
    return made is not None and given is not None and made.dtype is given.dtype


def is_form(node: fx.Node) -> bool:
    """Whether the node's arguments name the sizes of its result."""
    return move_name(node) in FORMS


def sizes_of(node: fx.Node, numbers: SizeNumbers = NO_SYMBOLS) -> list[int]:
    """Return the sizes of the tensor the node makes; raises Lost when one is not known."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        raise Lost("a size is not known when compiling")
    return [numbers.product_of(size) for size in value.shape]


def cut_dim(node: fx.Node) -> int:
    """Return the dimension a split, a chunk or a concatenation works along, from the left."""
    made = pytree.tree_leaves(value_of(node))
    if not made or not isinstance(made[0], torch.Tensor):
        raise Lost(f"{operator_at(node)} makes something unknown")
    return dim_of(node, made[0].dim(), default=0)


class Tracker:
    """The factors of the values of one region."""

    def __init__(self, numbers: SizeNumbers = NO_SYMBOLS) -> None:
        """Start with no value known; `numbers` stand for sizes that are symbols."""
        self.numbers = numbers
        self._dims: dict[fx.Node, Dims] = {}
        self._started: list[fx.Node] = []
        self.sent: dict[fx.Node, list[Factor]] = {}
        """Exchange -> the factors that said which rank a row went to."""
        self.source: dict[fx.Node, Factor] = {}
        """Exchange -> the factor that says which rank a row came from."""
        self.closed: list[tuple[fx.Node, list[Factor]]] = []
        """Node -> a dimension whose indices it does not treat apart."""

    def __contains__(self, node: fx.Node) -> bool:
        """Whether the factors of `node` are known."""
        return node in self._dims

    def sizes_of(self, node: fx.Node) -> list[int]:
        """Return the sizes of the tensor the node makes; raises Lost when one is not known."""
        return sizes_of(node, self.numbers)

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """Return what `node` reads, but for what tells the sizes and bounds of what it moves."""
        is_told = is_movement(node) or node.target in (operator.getitem, operator.setitem)
        return [n for n in node.all_input_nodes if not (is_told and self.numbers.tells_sizes(n))]

    def cut_sizes(self, cut: fx.Node) -> list[int]:
        """Return how long the pieces of a split or chunk are."""
        along = cut_dim(cut)
        return [self.numbers.product_of(piece.shape[along]) for piece in value_of(cut)]

    def start(self, node: fx.Node) -> None:
        """Give every dimension of `node` a factor of its own."""
        self._dims[node] = [[Factor(size)] for size in self.sizes_of(node)]
        self._started.append(node)

    def put(self, node: fx.Node, dims: Dims) -> None:
        """Say what the factors of `node` are; raises Lost unless its sizes agree."""
        if tensor_of(node) is not None and [size_of(dim) for dim in dims] != self.sizes_of(node):
            raise Lost(f"{operator_at(node)} has other sizes than were followed to it")
        self._dims[node] = dims

    def started(self) -> tuple[fx.Node, ...]:
        """Return every value that tracking began at."""
        return tuple(self._started)

    def result_of_attention(self, core: fx.Node, query: fx.Node, value: fx.Node) -> None:
        """Give the result of attention the query's factors but for the last dimension."""
        self._dims[core] = [*self.dims(query)[:-1], [Factor(self.sizes_of(value)[-1])]]

    def dims(self, node: fx.Node) -> Dims:
        """Return the factors of `node`."""
        if node not in self:
            raise Lost(f"{operator_at(node)} was not followed")
        return [flat(dim) for dim in self._dims[node]]

    def step(self, node: fx.Node) -> None:
        """Find the factors of a movement from those of its inputs."""
        self.put(node, _rule_of(node)(self, node))

    def _source(self, node: fx.Node) -> Dims:
        return self.dims(moved(node))

    def _formed(self, node: fx.Node) -> Dims:
        return regroup([f for dim in self._source(node) for f in dim], self.sizes_of(node))

    def _swapped(self, node: fx.Node) -> Dims:
        dims = self._source(node)
        i, j = (from_left(argument(node, name), len(dims)) for name in _pair_of(node))
        dims[i], dims[j] = dims[j], dims[i]
        return dims

    def _shifted(self, node: fx.Node) -> Dims:
        dims = self._source(node)
        given = [argument(node, name) for name in ("source", "destination")]
        taken, places = (
            [from_left(d, len(dims)) for d in (g if isinstance(g, list | tuple) else [g])]
            for g in given
        )
        placed = dict(zip(places, taken, strict=True))
        rest = iter(i for i in range(len(dims)) if i not in taken)
        return [dims[placed[i] if i in placed else next(rest)] for i in range(len(dims))]

    def _permuted(self, node: fx.Node) -> Dims:
        dims = self._source(node)
        order: Any = argument(node, "dims")
        order = order if isinstance(order, list | tuple) else node.args[1:]
        return [dims[from_left(i, len(dims))] for i in order]

    def _expanded(self, node: fx.Node) -> Dims:
        sizes, dims = self.sizes_of(node), self._source(node)
        dims = [[] for _ in range(len(sizes) - len(dims))] + dims
        return [
            dim if size_of(dim) == size else [Factor(size)]
            for dim, size in zip(dims, sizes, strict=True)
        ]

    def _repeated(self, node: fx.Node) -> Dims:
        dims = self._source(node)
        times = argument(node, "repeats")
        if not isinstance(times, int):
            raise Lost("an uneven repetition")
        i = dim_of(node, len(dims))
        dims[i] = [*dims[i], Factor(times)]
        return dims

    def _joined(self, node: fx.Node) -> Dims:
        parts = joined(node)
        given, along = [self.dims(part) for part in parts], cut_dim(node)
        for dims in given[1:]:
            if len(dims) != len(given[0]):
                raise Lost("a concatenation of tensors with other numbers of dimensions")
            for i, (first, other) in enumerate(zip(given[0], dims, strict=True)):
                if i != along:
                    unify(first, other)
        dims = self.dims(parts[0])
        pieces = tuple(self._dims[part][along] for part in parts)
        dims[along] = [Factor(sum(size_of(piece) for piece in pieces), pieces=pieces)]
        return dims

    def _piece(self, node: fx.Node) -> Dims:
        cut, index = node.args
        assert isinstance(cut, fx.Node) and isinstance(index, int)
        return self.piece(cut, index)

    def piece(self, cut: fx.Node, index: int) -> Dims:
        """Return the factors of one piece of a split."""
        along, dims, sizes = cut_dim(cut), self.dims(cut), self.cut_sizes(cut)
        whole = dims[along]
        made = whole[0].pieces if len(whole) == 1 else ()
        same = [size_of(piece) for piece in made] == sizes
        dims[along] = flat(made[index]) if same else [Factor(sizes[index])]
        return dims

    def piece_read(self, cut: fx.Node, index: int) -> Dims:
        """Return the factors of one piece of a split, as its readers told them where it has any."""
        known = [u for u in cut.users if u in self and u.args[1] == index]
        return self.dims(known[0]) if known else self.piece(cut, index)

    def _exchanged(self, node: fx.Node) -> Dims:
        if not is_even_exchange(node):
            raise Lost("an exchange that is not even")
        dims, num_ranks = self._source(node), len(output_splits(node))
        sent, rest = regroup(dims[0], [num_ranks, size_of(dims[0]) // num_ranks])
        self.sent[node], self.source[node] = sent, Factor(num_ranks)
        return [[self.source[node], *rest], *dims[1:]]


def _pair_of(swap: fx.Node) -> tuple[str, ...]:
    """Return the names of the dimensions that change places."""
    return PARAMETERS[move_name(swap)][1:]


RULES: Final = {
    **dict.fromkeys(COPIES | CUTS, Tracker._source),
    **dict.fromkeys(FORMS, Tracker._formed),
    **dict.fromkeys(SWAPS, Tracker._swapped),
    **dict.fromkeys(SHIFTS, Tracker._shifted),
    "permute": Tracker._permuted,
    "expand": Tracker._expanded,
    "repeat_interleave": Tracker._repeated,
    "cat": Tracker._joined,
}


def _rule_of(node: fx.Node) -> Callable[[Tracker, fx.Node], Dims]:
    if is_all_to_all(node):
        return Tracker._exchanged
    if is_wait(node):
        return Tracker._source
    if node.target is operator.getitem:
        return Tracker._piece
    if (name := move_name(node)) not in RULES:
        raise Lost(f"{operator_at(node)} is no movement of data")
    return RULES[name]


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
