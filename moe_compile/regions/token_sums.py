"""The sum per token after a combine: rows added by index, or put in order first.

Contract
    A `TokenSum` says which rows are added up for a token, and by which weights; the graph is not
    edited. Every argument of every call in it is understood, and all numbers are added up in the
    type of the rows; weighted ones in that of the weights. Two forms are known:

    base.index_add(0, index, rows), or scatter_add by the same index in every column
    z = zeros; z[order] = rows, or index_copy; z.reshape(tokens, k, width), then sum(1), bmm or
    einsum with the weights, or a product with them and sum(1)

    In the second, z may be unfilled memory if each place gets a row. The form
    `rows[argsort(order)]` in place of z fills each place as well.
"""

from __future__ import annotations

import operator
from collections.abc import Container
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import torch
import torch.fx as fx

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.effects import is_size_query
from moe_compile.graph.query import operator_at, tensor_of, where_equal
from moe_compile.graph.torch_calls import SORT_PARAMETERS, arguments_of, torch_name
from moe_compile.journal.reasons import Left, Reason
from moe_compile.regions.row_chain import CASTS, RowChain, num_rows, only_reader, shape_of, type_of
from moe_compile.regions.token_index import repeated_in_rows
from moe_compile.regions.token_regions import TokenSum

ADDS: Final = {
    "index_add": ("input", "dim", "index", "source", "alpha"),
    "scatter_add": ("input", "dim", "index", "src"),
}
"""Sums by index, and their arguments; `scatter_add` takes the number of a row in every column."""
ZEROS: Final = frozenset({"zeros", "zeros_like", "new_zeros"})
ONES: Final = frozenset({"ones", "ones_like", "new_ones"})
EMPTY: Final = frozenset({"empty", "empty_like", "new_empty"})
MULTIPLIES: Final = frozenset({"mul", "mul_"})
SUMS_UP: Final = frozenset({"bmm", "einsum"})
"""Products that are sums, too."""
WEIGHS: Final = MULTIPLIES | SUMS_UP
OF_ZEROS: Final = frozenset({"size", "dtype", "layout", "device", "pin_memory", "memory_format"})
"""Arguments that do not change the zeros; a layout is read off the tensor."""
FORMS: Final = frozenset({"reshape", "view", "unflatten"})
ROWS_OF_TOKENS: Final = (1, -2, [1], (1,), [-2], (-2,))
"""The dimension of a token's rows in `[T, k, D]`, as sums take it."""


def find_token_sum(
    result: fx.Node, num_sent: object, dependence: Dependence
) -> tuple[RowChain, TokenSum]:
    """Return the steps that change the rows of `result` one by one, and the sum per token after.

    As many rows come back as were sent, `num_sent`. Raises Left where there is no such sum.
    """
    chain = RowChain()
    node = result
    while True:
        user, steps = _reader(node), _Steps(node, num_sent, dependence)
        if torch_name(user) in ADDS:
            return chain, _by_index(user, steps)
        if user.target is operator.setitem:
            return chain, _in_order(user, steps)
        if torch_name(user) == "index_copy":
            return chain, _copied_in_order(user, steps)
        if (order := _order_undone(user, node)) is not None:
            inverse = _index_of(user)
            before = (inverse, user) if len(inverse.users) == 1 else (user,)
            return chain, _by_token(user, steps, order, before)
        if chain.add(user, Reason.NO_SUM) is not node:
            raise Left(Reason.NOT_BY_ROW, operator_at(user))
        node = user


def _reader(node: fx.Node) -> fx.Node:
    """Return the one node that reads the numbers of `node`; others may make memory by its sizes."""
    readers = [user for user in node.users if not reads_sizes(user)]
    return only_reader(node) if len(readers) != 1 else readers[0]


def reads_sizes(node: fx.Node) -> bool:
    """Whether the node makes memory of a tensor's sizes, or asks for these to do that."""
    return is_made(node, ZEROS | EMPTY) or (
        is_size_query(node) and all(is_made(u, ZEROS | EMPTY) for u in node.users)
    )


def _made_with(memory: fx.Node) -> tuple[fx.Node, ...]:
    """Return the nodes that serve `memory` alone: size queries, and itself."""
    asked = [n for n in memory.all_input_nodes if is_size_query(n) and len(n.users) == 1]
    return (*asked, memory)


def is_zeros(node: Any) -> bool:
    """Whether the node makes a tensor of zeros, all of whose memory is its own."""
    return is_made(node, ZEROS)


def is_made(node: Any, makers: Container[str]) -> bool:
    """Whether one of `makers` of torch makes the tensor, of memory that is its own."""
    if not isinstance(node, fx.Node) or torch_name(node) not in makers:
        return False
    tensor = tensor_of(node)
    plain = tensor is not None and tensor.layout is torch.strided
    return plain and node.kwargs.keys() <= OF_ZEROS


def _order_undone(taken: fx.Node, rows: fx.Node) -> fx.Node | None:
    """Return `order` where the node is `rows[argsort(order)]`, else None."""
    if taken.target is not operator.getitem or taken.args[0] is not rows:
        return None
    given = arguments_of(_index_of(taken), "argsort", *SORT_PARAMETERS)
    if given is None or given.get("descending") or given.get("dim", -1) not in (0, -1):
        return None
    order = given["input"]
    return order if isinstance(order, fx.Node) and len(shape_of(order)) == 1 else None


def _index_of(node: fx.Node) -> Any:
    """Return i of `x[i]`, `x[i, :]`, and where they are written."""
    index = node.args[1]
    is_row = isinstance(index, tuple) and index[1:] == (slice(None),)
    return index[0] if is_row else index


def base_of(total: fx.Node) -> fx.Node | None:
    """Return the tensor that a sum by index adds to; None where `total` is another form."""
    given = _sum_by_index(total)
    return None if given is None else given.base


@dataclass(frozen=True, slots=True)
class _SumByIndex:
    """Adds row r of `rows` to row `index[r]` of `base`: by `scatter_add` of as many as there are
    indices."""

    base: fx.Node
    index: fx.Node
    rows: fx.Node


def _sum_by_index(total: fx.Node) -> _SumByIndex | None:
    name = torch_name(total)
    if name not in ADDS:
        return None
    given = arguments_of(total, name, *ADDS[name]) or {}
    base, index, rows = (given.get(each) for each in ("input", "index", ADDS[name][3]))
    if name == "scatter_add":
        is_whole = shape_of(index)[1:] == shape_of(rows)[1:] == shape_of(base)[1:]
        index = repeated_in_rows(index) if is_whole else None
    is_plain = given.get("dim") in (0, -2) and given.get("alpha", 1) == 1
    nodes = [one for one in (base, index, rows) if isinstance(one, fx.Node)]
    return _SumByIndex(*nodes) if is_plain and len(nodes) == 3 else None


def _by_index(total: fx.Node, steps: _Steps) -> TokenSum:
    found, rows = _sum_by_index(total), steps.rows
    by_row = found is not None and found.rows is rows and found.base is not rows
    if found is None or not by_row or type_of(total) is not type_of(rows):
        raise Left(Reason.NO_SUM, operator_at(total))
    adds_nothing = is_zeros(found.base) and not steps.dependence.writers(found.base)
    return TokenSum(
        rows=rows,
        total=total,
        index=found.index,
        is_order=False,
        num_sums=num_rows(total),
        base=None if adds_nothing else found.base,
        tail=(total,),
    )


def _in_order(write: fx.Node, steps: _Steps) -> TokenSum:
    """Read the form that puts rows in order, `k` to a token, and sums these."""
    (tokens, _, written), rows, dependence = write.args, steps.rows, steps.dependence
    order, is_filled = _index_of(write), is_zeros(tokens)
    alone = (is_filled or is_made(tokens, EMPTY)) and written is rows
    if not alone or not isinstance(tokens, fx.Node) or not isinstance(order, fx.Node):
        raise Left(Reason.NO_SUM, operator_at(write))
    readers = [user for user in tokens.users if user is not write]
    if len(readers) != 1 or dependence.position[readers[0]] < dependence.position[write]:
        raise Left(Reason.NO_SUM, operator_at(write))
    found = _by_token(tokens, steps, order, (*_made_with(tokens), write), readers[0])
    own = {write, *found.tail[found.tail.index(readers[0]) :]}
    if not {*dependence.writers(tokens)} <= own:
        raise Left(Reason.NO_SUM, operator_at(write))
    return replace(found, memory=tokens, needs_all=not is_filled)


def _copied_in_order(write: fx.Node, steps: _Steps) -> TokenSum:
    """Read the form that puts rows in order in a copy of memory that nothing else has."""
    given = arguments_of(write, "index_copy", "input", "dim", "index", "source") or {}
    memory, order, source = (given.get(name) for name in ("input", "index", "source"))
    is_filled, is_rows = is_zeros(memory), source is steps.rows
    alone = (is_filled or is_made(memory, EMPTY)) and is_rows and given.get("dim") in (0, -2)
    if not alone or not isinstance(memory, fx.Node) or not isinstance(order, fx.Node):
        raise Left(Reason.NO_SUM, operator_at(write))
    if len(memory.users) != 1 or steps.dependence.writers(memory):
        raise Left(Reason.NO_SUM, operator_at(write))
    found = _by_token(write, steps, order, (*_made_with(memory), write))
    return replace(found, memory=memory, needs_all=not is_filled)


def _by_token(
    ordered: fx.Node,
    steps: _Steps,
    order: fx.Node,
    before: tuple[fx.Node, ...],
    reader: fx.Node | None = None,
) -> TokenSum:
    """Read the nodes after rows in order: a view by token, and the sums of these."""
    rows = steps.rows
    if type_of(ordered) is not type_of(rows) or shape_of(ordered)[1:] != shape_of(rows)[1:]:
        raise Left(Reason.NO_SUM, operator_at(ordered))
    node = ordered
    while not steps.is_ended:
        user = reader or only_reader(node)
        steps.add(user, node)
        node, reader = steps.nodes[-1], None
    return TokenSum(
        rows=rows,
        total=node,
        index=order,
        is_order=True,
        num_sums=steps.sizes(steps.by_token)[0],
        num_slots=steps.sizes(steps.by_token)[1],
        weights=steps.weights,
        tail=(*before, *steps.nodes),
        by_token=steps.by_token,
        needs_all=True,
    )


class _Steps:
    """The steps from rows in order to their sums; an unknown step raises Left."""

    def __init__(self, rows: fx.Node, num_sent: object, dependence: Dependence) -> None:
        self.rows, self.dependence = rows, dependence
        self._num_sent = num_sent
        self.nodes: list[fx.Node] = []
        self.weights: fx.Node | None = None
        self._by_token: fx.Node | None = None
        self.is_ended = False

    @property
    def by_token(self) -> fx.Node:
        assert self._by_token is not None
        return self._by_token

    def sizes(self, node: fx.Node) -> list[Any]:
        """Return the sizes of a tensor, with the rows that came back as those that were sent."""
        came_back = num_rows(self.rows)
        return [where_equal(size, came_back, self._num_sent) for size in shape_of(node)]

    def add(self, user: fx.Node, node: fx.Node) -> None:
        """Add `user`, which reads `node`, the last step so far."""
        self.nodes.append(user)
        name = torch_name(user)
        if name in FORMS and self._by_token is None:
            self._by_token = user
            sizes = self.sizes(user)
            is_known = len(sizes) == 3 and sizes[2:] == self.sizes(node)[1:]
        elif name in WEIGHS:
            is_known = self._weigh(user, node)
        elif name == "sum":
            is_known = self._is_sum(user)
            self.is_ended = True
        else:
            is_known = _is_cast(user) and self.weights is None
        if not is_known or (self.is_ended and not self._keeps_types()):
            raise Left(Reason.NO_SUM, operator_at(user))

    def _weigh(self, user: fx.Node, node: fx.Node) -> bool:
        """Take in a product with weights, by row or by token; whether it is one."""
        sizes = self.sizes(node)[:2]
        if torch_name(user) == "bmm":
            given = arguments_of(user, "bmm", "input", "mat2") or {}
            weights, times = given.get("input"), given.get("mat2")
            sizes = [sizes[0], 1, *sizes[1:]]
            is_known = self._by_token is not None and times is node
        elif torch_name(user) == "einsum":
            weights = _weights_of_einsum(user, node)
            is_known = self._by_token is not None
        else:
            others = [one for one in user.args if one is not node]
            weights = others[0] if len(others) == 1 else None
            sizes = [*sizes, 1]
            is_known = len(user.args) == 2 and not user.kwargs
        if not is_known or self.weights is not None or not isinstance(weights, fx.Node):
            return False
        self.weights = weights
        if torch_name(user) == "bmm":
            self.nodes += _squeezed(user)[1:]
        self.is_ended = torch_name(user) in SUMS_UP
        is_by_row = self._by_token is None and len(shape_of(weights)) == 2  # checked at the sum
        return is_by_row or self.sizes(weights) == sizes

    def _is_sum(self, user: fx.Node) -> bool:
        given = arguments_of(user, "sum", "input", "dim", "keepdim", "dtype") or {}
        is_plain = given.get("dim") in ROWS_OF_TOKENS and not given.get("keepdim")
        if not is_plain or "dtype" in given or self._by_token is None:
            return False
        if self.weights is None or len(shape_of(self.weights)) != 2:
            return True
        tokens, slots, *_ = self.sizes(self._by_token)
        return self.sizes(self.weights) == [tokens * slots, 1]  # one for each row in order

    def _keeps_types(self) -> bool:
        """Whether rows are multiplied and added up in one type, which holds all before it."""
        if self.weights is None:
            return all(type_of(node) is type_of(self.rows) for node in self.nodes)
        wide, last = type_of(self.weights), type_of(self.nodes[-1])
        product = next(i for i, node in enumerate(self.nodes) if torch_name(node) in WEIGHS)
        before = [self.rows, *self.nodes[:product]]
        holds = all(_holds(type_of(new), type_of(old), wide) for old, new in pairwise(before))
        is_wide = type_of(before[-1]) is type_of(self.nodes[product]) is wide
        return holds and is_wide and all(type_of(n) in (wide, last) for n in self.nodes[product:])


def _weights_of_einsum(product: fx.Node, by_token: fx.Node) -> fx.Node | None:
    """Return w of `einsum("tkd,tk->td", by_token, w)`, under any letters and either way round."""
    equation, *operands = product.args
    if product.kwargs or not isinstance(equation, str) or len(operands) != 2:
        return None
    terms, _, result = equation.replace(" ", "").partition("->")
    letters = dict(zip(operands, terms.split(","), strict=True))
    weights = next((one for one in operands if one is not by_token), None)
    named, width = letters.get(by_token, ""), 3
    if len({*named}) != width or not isinstance(weights, fx.Node):
        return None
    is_weighted = letters[weights] == named[:2] and result == named[0] + named[2]
    return weights if is_weighted else None


def _squeezed(product: fx.Node) -> list[fx.Node]:
    """Return `product`, `[T, 1, D]`, and the nodes that make it `[T, D]`, in order."""
    found = [product]
    while len(shape_of(found[-1])) == 3:
        node = only_reader(found[-1])
        given = arguments_of(node, "squeeze", "input", "dim") or {}
        if given.get("dim") not in (1, -2) and not _is_cast(node):
            raise Left(Reason.NO_SUM, operator_at(node))
        found.append(node)
    return found


def _is_cast(node: fx.Node) -> bool:
    """Whether the node gives the same numbers in another type, and nothing else."""
    return node.op == "call_method" and node.target in CASTS and len(node.all_input_nodes) == 1


def _holds(new: torch.dtype | None, old: torch.dtype | None, wide: torch.dtype | None) -> bool:
    """Whether a cast from `old` to `new` on the way to `wide` loses nothing that `wide` keeps."""
    if new is None or old is None:
        return False
    return new is wide or torch.promote_types(new, old) is new
