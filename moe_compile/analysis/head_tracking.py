"""Follow the factors of tensors through the operators that only move data.

Contract
    `is_movement` names the operators followed; every other one ends a path, or raises Lost.
    Sizes must be numbers: a symbolic size raises Lost.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.fx as fx

from moe_compile.analysis.head_factors import Dims, Factor, Lost, flat, regroup, size_of, unify
from moe_compile.graph.query import (
    input_splits,
    is_all_to_all,
    is_wait,
    output_splits,
    value_of,
)

FORMS: Final = frozenset(
    {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"}
)
"""Operators that regroup dimensions in order: the sizes of the result say how."""

COPIES: Final = frozenset({"contiguous", "clone"})
SWAPS: Final = frozenset({"transpose", "swapaxes"})
CUTS: Final = frozenset({"split", "chunk"})
OTHERS: Final = frozenset({"permute", "movedim", "expand", "repeat_interleave", "cat"})


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
    moves = FORMS | COPIES | SWAPS | CUTS | OTHERS
    return is_all_to_all(node) or move_name(node) in moves


def is_form(node: fx.Node) -> bool:
    """Whether the node's arguments name the sizes of its result."""
    return move_name(node) in FORMS


def sizes_of(node: fx.Node) -> list[int]:
    """Return the sizes of the tensor the node makes; raises Lost when one is symbolic."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or not all(isinstance(s, int) for s in value.shape):
        raise Lost("a size is not known when compiling")
    return [int(s) for s in value.shape]


def cut_dim(node: fx.Node) -> int:
    """Return the dimension a split, a chunk or a concatenation works along, from the left."""
    default = 0
    position = 1 if move_name(node) == "cat" else 2
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)
    value = value_of(node)
    tensor = value if isinstance(value, torch.Tensor) else value[0]
    if not isinstance(dim, int):
        raise Lost("a dimension is not known when compiling")
    return dim % int(tensor.dim())


class Tracker:
    """The factors of the values of one region."""

    def __init__(self) -> None:
        """Start with no value known."""
        self._dims: dict[fx.Node, Dims] = {}
        self._started: list[fx.Node] = []
        self.sent: dict[fx.Node, list[Factor]] = {}
        """Exchange -> the factors that said which rank a row went to."""
        self.source: dict[fx.Node, Factor] = {}
        """Exchange -> the factor that says which rank a row came from."""

    def __contains__(self, node: fx.Node) -> bool:
        """Whether the factors of `node` are known."""
        return node in self._dims

    def start(self, node: fx.Node) -> None:
        """Give every dimension of `node` a factor of its own."""
        self._dims[node] = [[Factor(size)] for size in sizes_of(node)]
        self._started.append(node)

    def started(self) -> list[Dims]:
        """Return the factors of every value that tracking began at."""
        return [self.dims(node) for node in self._started]

    def result_of_attention(self, core: fx.Node, query: fx.Node, value: fx.Node) -> None:
        """Give the result of attention the query's factors but for the last dimension."""
        self._dims[core] = [*self.dims(query)[:-1], [Factor(sizes_of(value)[-1])]]

    def dims(self, node: fx.Node) -> Dims:
        """Return the factors of `node`."""
        return [flat(dim) for dim in self._dims[node]]

    def step(self, node: fx.Node) -> None:
        """Find the factors of a movement from those of its inputs."""
        self._dims[node] = self._moved(node)

    def _moved(self, node: fx.Node) -> Dims:
        if node.target is operator.getitem:
            return self._piece(node)
        rule = _rule_of(node)
        return rule(self, node)

    def _source(self, node: fx.Node) -> Dims:
        source = node.args[0]
        if not isinstance(source, fx.Node):
            raise Lost("an operator with its input in an unknown place")
        return self.dims(source)

    def _same(self, node: fx.Node) -> Dims:
        return self._source(node)

    def _formed(self, node: fx.Node) -> Dims:
        return regroup([f for dim in self._source(node) for f in dim], sizes_of(node))

    def _swapped(self, node: fx.Node) -> Dims:
        dims = self._source(node)
        i, j = (_number(a, len(dims)) for a in node.args[1:3])
        dims[i], dims[j] = dims[j], dims[i]
        return dims

    def _permuted(self, node: fx.Node) -> Dims:
        dims = self._source(node)
        order: Any = node.args[1] if isinstance(node.args[1], list | tuple) else node.args[1:]
        return [dims[_number(i, len(dims))] for i in order]

    def _one_moved(self, node: fx.Node) -> Dims:
        dims = self._source(node)
        source, target = (_number(a, len(dims)) for a in node.args[1:3])
        dims.insert(target, dims.pop(source))
        return dims

    def _expanded(self, node: fx.Node) -> Dims:
        sizes, dims = sizes_of(node), self._source(node)
        dims = [[] for _ in range(len(sizes) - len(dims))] + dims
        return [
            dim if size_of(dim) == size else [Factor(size)]
            for dim, size in zip(dims, sizes, strict=True)
        ]

    def _repeated(self, node: fx.Node) -> Dims:
        dims = self._source(node)
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        times = node.args[1] if len(node.args) > 1 else node.kwargs.get("repeats")
        if not isinstance(times, int):
            raise Lost("an uneven repetition")
        i = _number(dim, len(dims))
        dims[i] = [*dims[i], Factor(times)]
        return dims

    def _joined(self, node: fx.Node) -> Dims:
        parts = node.args[0]
        if not isinstance(parts, list | tuple) or not all(isinstance(p, fx.Node) for p in parts):
            raise Lost("a concatenation of something unknown")
        along = cut_dim(node)
        for part in parts[1:]:
            pairs = enumerate(zip(self._dims[parts[0]], self._dims[part], strict=True))
            for i, (first, other) in pairs:
                if i != along:
                    unify(first, other)
        dims = self.dims(parts[0])
        pieces = tuple(self._dims[part][along] for part in parts)
        dims[along] = [Factor(sum(size_of(piece) for piece in pieces), pieces=pieces)]
        return dims

    def _piece(self, node: fx.Node) -> Dims:
        """Return the factors of one piece of a split."""
        cut, index = node.args
        assert isinstance(cut, fx.Node) and isinstance(index, int)
        along, dims, sizes = cut_dim(cut), self.dims(cut), sizes_of(node)
        whole = dims[along]
        made = whole[0].pieces if len(whole) == 1 else ()
        if len(made) == len(value_of(cut)) and size_of(made[index]) == sizes[along]:
            dims[along] = flat(made[index])
        else:
            dims[along] = [Factor(sizes[along])]
        return dims

    def _exchanged(self, node: fx.Node) -> Dims:
        if not is_even_exchange(node):
            raise Lost("an exchange that is not even")
        dims, num_ranks = self._source(node), len(output_splits(node))
        sent, rest = regroup(dims[0], [num_ranks, size_of(dims[0]) // num_ranks])
        self.sent[node], self.source[node] = sent, Factor(num_ranks)
        return [[self.source[node], *rest], *dims[1:]]


def _number(value: Any, num_dims: int) -> int:
    if not isinstance(value, int):
        raise Lost("a dimension is not known when compiling")
    return value % num_dims


def _rule_of(node: fx.Node) -> Callable[[Tracker, fx.Node], Dims]:
    name = move_name(node)
    if is_all_to_all(node):
        return Tracker._exchanged
    if is_wait(node) or name in COPIES or name in CUTS:
        return Tracker._same
    if name in FORMS:
        return Tracker._formed
    if name in SWAPS:
        return Tracker._swapped
    rules = {
        "permute": Tracker._permuted,
        "movedim": Tracker._one_moved,
        "expand": Tracker._expanded,
        "repeat_interleave": Tracker._repeated,
        "cat": Tracker._joined,
    }
    if name not in rules:
        raise Lost(f"{node.name} is no movement of data")
    return rules[name]
