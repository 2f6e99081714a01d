"""Facts about the index that gives the token of each routed row.

Contract
    An answer holds for any routing. It rests on the graph's structure: two expressions are the
    same when the same operators read the same inputs, and nothing writes what they read.

Worked example, two experts a token of four: chosen [[2, 0], [0, 3]], flat [2, 0, 0, 3], order
[1, 2, 0, 3], tokens of the rows order // 2 = [0, 1, 0, 1]: every token has two rows. If these
are tokens 2 and 3 of four, the others another rank's, (order + 4) // 2 = [2, 3, 2, 3].
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.fx as fx

from moe_compile.graph.dependence import storages
from moe_compile.graph.effects import is_pure
from moe_compile.graph.legality import Legality
from moe_compile.graph.query import (
    argument_of,
    called_name,
    expression_of,
    is_integer,
    is_never_negative,
    tensor_of,
    value_of,
)
from moe_compile.graph.torch_calls import SORT_PARAMETERS, arguments_of, torch_name
from moe_compile.regions.row_chain import num_rows, shape_of
from moe_compile.regions.token_regions import TokenPart

FORMS: Final = frozenset(
    {"to", "int", "long", "view", "reshape", "flatten", "contiguous", "ravel", "detach", "squeeze"}
)
"""Methods that keep the flat order of integers, and their values if the new type holds them."""
CASTS: Final = frozenset({"to", "int", "long"})
EXPANDS: Final = frozenset({"expand", "expand_as", "broadcast_to"})
IN_COLUMNS: Final = ("gather", "scatter_add")
"""Operators whose index has a number for every column."""
HOLDS_ALL: Final = (torch.int32, torch.int64)
"""Types of integers that hold every row's number: a rank has fewer than 2**31."""
FLOOR: Final = "floor"
TOPK: Final = ("input", "k", "dim", "largest", "sorted")


def is_same_value(left: Any, right: Any, legality: Legality) -> bool:
    """Whether two arguments are the same value: Dynamo writes a repeated expression twice."""
    apart: dict[fx.Node, None] = {}
    if not _is_same_expression(left, right, apart):
        return False
    if not apart:
        return True
    last = legality.dependence.in_order(apart)[-1]
    return all(map(_is_determined, apart)) and legality.obstacle(apart, last) is None


def _is_same_expression(left: Any, right: Any, apart: dict[fx.Node, None]) -> bool:
    """Whether the same operators read the same inputs; distinct nodes are added to `apart`."""
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return type(left) is type(right) and bool(left == right)
    if left is right:
        return True
    same_call = (left.op, left.target) == (right.op, right.target)
    if not same_call or left.op not in ("call_function", "call_method"):
        return False
    apart |= dict.fromkeys((left, right))
    mine, other = ([*node.args, *node.kwargs.items()] for node in (left, right))
    return len(mine) == len(other) and all(
        _is_same_expression(a, b, apart) for a, b in zip(mine, other, strict=True)
    )


def _is_determined(node: fx.Node) -> bool:
    """Whether the node's inputs determine its value: unfilled memory may hold anything."""
    return is_pure(node) and "empty" not in called_name(node)


def mean_rows_per_token(index: fx.Node, tokens: fx.Node) -> int | None:
    """Return k where `index` has k times as many rows as there are tokens, on every rank.

    It must be computed from a `topk` that chooses k for each token. An index that is an input may
    have another number of rows on another rank or in another step.
    """
    found: list[int] = []
    seen, todo = {index}, [index]
    while todo:
        node = todo.pop()
        if node.op in ("placeholder", "get_attr") and _is_of_numbers(node):
            return None
        given = arguments_of(node, "topk", *TOPK)
        if given is not None and type(given.get("k")) is int:
            found.append(given["k"])
            continue
        todo += [n for n in node.all_input_nodes if n not in seen]
        seen.update(node.all_input_nodes)
    rows, of = _length(index), _length(tokens)
    return next((k for k in found if k > 0 and rows == k * of), None)


def _is_of_numbers(node: fx.Node) -> bool:
    """Whether a tensor holds integers or booleans, by which rows can be counted."""
    tensor = tensor_of(node)
    return tensor is not None and (is_integer(node) or tensor.dtype is torch.bool)


def repeated_in_rows(index: Any) -> fx.Node | None:
    """Return the vector i where `index` is `i[:, None].expand(-1, D)`, or another form of that.

    `gather` and `scatter_add` take row numbers in this form. All forms are views of i.
    """
    node = index if isinstance(index, fx.Node) and len(shape_of(index)) == 2 else None
    while node is not None and called_name(node) in EXPANDS:
        node = _node(node.args[0])
    while node is not None and shape_of(node) == [num_rows(index), 1] and _is_one_column(node):
        node = _node(node.args[0])
    if node is None or shape_of(node) != [num_rows(index)] or storages(node) != storages(index):
        return None
    return node


def index_in_columns(node: fx.Node) -> fx.Node | None:
    """Return the index of `gather` or `scatter_add`; None of another operator."""
    index = argument_of(node, 2, "index") if torch_name(node) in IN_COLUMNS else None
    return _node(index)


def _is_one_column(node: fx.Node) -> bool:
    """Whether `node`, `[R, 1]`, has the elements of its source in the same order."""
    if node.target is not operator.getitem:
        return called_name(node) in ("unsqueeze", "view", "reshape")
    given = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(one is None or one is ... or one == slice(None) for one in given)


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """Proofs about indices of one graph."""

    written: frozenset[int]
    """Storages that the graph writes in place: their makers do not determine their contents."""

    def rows_of_each_token(self, index: fx.Node, tokens: fx.Node) -> int | None:
        """Return the number of rows of every token: `k` where `index` is `order // k`, else None.

        `order` must be a permutation of as many rows as `k` times the tokens.
        """
        divided = self._divided(index)
        if divided is None or not self.is_permutation(divided[0]):
            return None
        rows, k = _length(index), divided[1]
        return k if rows is not None and rows == k * _length(tokens) else None

    def part_of(self, index: fx.Node) -> TokenPart | None:
        """Return the tokens that have rows if they are a part of all tokens and consecutive.

        `index` is then `(order + k * first) // k`, and `order` sorts a slice, from `first` on, of
        the indices of a `topk` of k for each token: all tokens of the slice have k rows.
        """
        divided, chosen = self._divided(index), self.chosen_of(index)
        first = None if chosen is None else self._first_of_slice(chosen)
        if divided is None or first is None:
            return None
        return TokenPart(first=first, rows_per_token=divided[1])

    def is_permutation(self, order: fx.Node) -> bool:
        """Whether `order` sorts a vector, so that it has every number of a row once."""
        return self._sorted_by(order) is not None and self._shift(order) == 0

    def order_of(self, index: fx.Node) -> fx.Node | None:
        """Return `order` where `index` is `order // k`, else None."""
        divided = self._divided(index)
        return None if divided is None else divided[0]

    def chosen_of(self, index: fx.Node) -> fx.Node | None:
        """Return the indices of the `topk` whose flat order sorts the rows; None when not found.

        They may be those of a part of the tokens: row j of them is of token `first + j`.
        A token has at most one row for an expert: `topk` of k chooses k different ones for it.
        """
        divided = self._divided(index)
        key = None if divided is None else self._sorted_by(divided[0])
        if divided is None or key is None:
            return None
        chosen = self.origin(key)
        given, tensor = self.topk_of(chosen), tensor_of(chosen)
        if given is None or tensor is None or given.get("k") != divided[1]:
            return None
        whole = expression_of(tensor.numel()) == num_rows(key)
        in_rows = given.get("dim", -1) in (-1, tensor.dim() - 1) and tensor.shape[-1] == divided[1]
        first = self._first_of_slice(chosen) or 0
        is_of_these = self._shift(divided[0]) == expression_of(first) * divided[1]
        return chosen if whole and in_rows and is_of_these else None

    def not_chosen(self, index: fx.Node) -> fx.Node:
        """Return the node at which `chosen_of` stops: the index if it is not `order // k`, else the
        order if it sorts nothing, else the origin of the vector it sorts."""
        divided = self._divided(index)
        key = None if divided is None else self._sorted_by(divided[0])
        return index if divided is None else divided[0] if key is None else self.origin(key)

    def topk_of(self, chosen: fx.Node) -> dict[str, Any] | None:
        """Return the arguments of the `topk` whose indices, or rows of them, are `chosen`."""
        source = None if self._first_of_slice(chosen) is None else _node(chosen.args[0])
        whole = chosen if source is None else self.origin(source)
        return self.output(whole, 1, "topk", *TOPK)

    def is_sorted_stably(self, index: fx.Node) -> bool:
        """Whether `index` is `order // k` of a stable sort from the least value to the greatest."""
        divided = self._divided(index)
        given = None if divided is None else self._sort(divided[0])
        return given is not None and given.get("stable") is True and not given.get("descending")

    def _divided(self, index: fx.Node) -> tuple[fx.Node, int] | None:
        """Return (order, k) of `order // k`."""
        index = self.origin(index)
        for name in ("floordiv", "__floordiv__", "floor_divide", "div", "divide"):
            given = self.arguments(index, name, "input", "other", "rounding_mode")
            if given is None or (name.startswith("div") and given.get("rounding_mode") != FLOOR):
                continue
            order, k = _node(given.get("input")), given.get("other")
            return (order, k) if order is not None and type(k) is int and k > 0 else None
        return None

    def _sorted_by(self, order: fx.Node) -> fx.Node | None:
        """Return the vector whose sort gives the permutation `order`."""
        given = self._sort(order)
        key = _node(given.get("input")) if given else None
        return key if key is not None and len(shape_of(key)) == 1 else None

    def _sort(self, order: fx.Node) -> dict[str, Any] | None:
        """Return the arguments of the sort that gives the permutation `order`, or that plus a
        number."""
        order = self.origin(self.unshifted(order)[0])
        return self.arguments(order, "argsort", *SORT_PARAMETERS) or self.output(
            order, 1, "sort", *SORT_PARAMETERS
        )

    def _shift(self, order: fx.Node) -> Any:
        """Return the number that is added to a permutation, as `expression_of` has it."""
        return expression_of(self.unshifted(order)[1])

    def unshifted(self, order: fx.Node) -> tuple[fx.Node, Any]:
        """Return (p, c) where `order` is `p + c`, c one number; (order, 0) of anything else."""
        given = self.arguments(self.origin(order), "add", "input", "other") or {}
        source, number = _node(given.get("input")), given.get("other")
        return (source, number) if source is not None and _is_size(number) else (order, 0)

    def _first_of_slice(self, rows: fx.Node) -> int | fx.Node | None:
        """Return the first row of the slice of a matrix that `rows` is; None of anything else."""
        if rows.target is not operator.getitem or self.is_written(rows):
            return None
        bounds, is_matrix = rows.args[1], len(shape_of(rows)) == 2
        if not isinstance(bounds, slice) or not is_matrix or bounds.step not in (None, 1):
            return None
        first = bounds.start or 0
        return first if is_never_negative(first) else None

    def output(
        self, result: fx.Node, position: int, name: str, *parameters: str
    ) -> dict[str, Any] | None:
        """Return the arguments of the call whose `position`-th output `result` is."""
        if result.target is not operator.getitem or result.args[1] != position:
            return None
        return None if self.is_written(result) else arguments_of(result.args[0], name, *parameters)

    def arguments(self, node: Any, name: str, *parameters: str) -> dict[str, Any] | None:
        """Return the arguments of the call that determines the values of `node`."""
        given = arguments_of(node, name, *parameters)
        return None if given is None or self.is_written(node) else given

    def origin(self, node: fx.Node) -> fx.Node:
        """Return the node that integers come from, before changes of form only."""
        while not self.is_written(node) and (source := _same_integers(node)) is not None:
            node = source
        return node

    def is_written(self, node: fx.Node) -> bool:
        """Whether something writes the node's memory in place."""
        return bool(storages(node) & self.written)


def _same_integers(node: fx.Node) -> fx.Node | None:
    """Return the source of `node` if it holds the same integers in the same flat order."""
    source = _node(node.args[0]) if node.op == "call_method" and node.target in FORMS else None
    before, after = (None if n is None else tensor_of(n) for n in (source, node))
    if source is None or before is None or after is None or not is_integer(source):
        return None
    widened = node.target in CASTS and after.dtype in HOLDS_ALL
    return source if widened or after.dtype is before.dtype else None


def _is_size(number: object) -> bool:
    """Whether the argument is an integer that the host knows, not a tensor."""
    value = value_of(number) if isinstance(number, fx.Node) else number
    return type(value) is int or isinstance(value, torch.SymInt)


def _length(node: fx.Node) -> Any:
    return num_rows(node)


def _node(argument: Any) -> fx.Node | None:
    return argument if isinstance(argument, fx.Node) else None
