"""What follows a combine when it is a sum per token: rows added by index, or put in order first.

Contract
    A `TokenSum` says which rows are added up for a token, and by which weights; the graph is not
    edited. Every argument of every call in it is understood, and all numbers are added up in the
    type of the rows; weighted ones in that of the weights. Two forms are known:

    base.index_add(0, index, rows)
    z = zeros; z[order] = rows; z.reshape(tokens, k, width), then sum(1) or bmm with the weights
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
import torch.fx as fx

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.query import tensor_of
from moe_compile.graph.torch_calls import arguments_of, torch_name
from moe_compile.journal.reasons import Reason
from moe_compile.regions.row_chain import (
    CASTS,
    NotByRow,
    RowChain,
    num_rows,
    only_reader,
    shape_of,
    type_of,
)
from moe_compile.regions.token_regions import TokenSum

ZEROS: Final = frozenset({"zeros", "zeros_like", "new_zeros"})
OF_ZEROS: Final = frozenset({"size", "dtype", "layout", "device", "pin_memory", "memory_format"})
"""Arguments that leave zeros what they are; a layout is read off the tensor."""
FORMS: Final = frozenset({"reshape", "view", "unflatten"})
ROWS_OF_TOKENS: Final = (1, -2, [1], (1,), [-2], (-2,))
"""The dimension of a token's rows in `[T, k, D]`, as sums take it."""


def find_token_sum(result: fx.Node, dependence: Dependence) -> tuple[RowChain, TokenSum]:
    """Return what changes the rows of `result` one by one, and the sum per token after that.

    Raises NotByRow where there is no such sum.
    """
    chain = RowChain()
    node = result
    while True:
        user = only_reader(node)
        if torch_name(user) == "index_add":
            return chain, _index_add(user, node, dependence)
        if user.target is operator.setitem:
            return chain, _in_order(user, node, dependence)
        if chain.add(user, Reason.NO_SUM) is not node:
            raise NotByRow(Reason.NOT_BY_ROW, user)
        node = user


def is_zeros(node: Any) -> bool:
    """Whether the node makes a tensor of zeros, all of whose memory is its own."""
    if not isinstance(node, fx.Node) or torch_name(node) not in ZEROS:
        return False
    tensor = tensor_of(node)
    plain = tensor is not None and tensor.layout is torch.strided
    return plain and node.kwargs.keys() <= OF_ZEROS


def _index_add(total: fx.Node, rows: fx.Node, dependence: Dependence) -> TokenSum:
    given = arguments_of(total, "index_add", "input", "dim", "index", "source", "alpha") or {}
    base, index = given.get("input"), given.get("index")
    known = isinstance(base, fx.Node) and isinstance(index, fx.Node) and base is not rows
    by_row = given.get("source") is rows and given.get("dim") == 0 and given.get("alpha", 1) == 1
    if not (known and by_row and type_of(total) is type_of(rows)):
        raise NotByRow(Reason.NO_SUM, total)
    assert isinstance(base, fx.Node) and isinstance(index, fx.Node)
    adds_nothing = is_zeros(base) and not dependence.writers(base)
    return TokenSum(
        total=total, index=index, is_order=False, base=None if adds_nothing else base, tail=(total,)
    )


def _in_order(write: fx.Node, rows: fx.Node, dependence: Dependence) -> TokenSum:
    """Read the form that puts rows in order, `k` to a token, and sums these."""
    tokens, order, written = write.args
    alone = is_zeros(tokens) and written is rows and isinstance(order, fx.Node)
    if not alone or not isinstance(tokens, fx.Node) or dependence.writers(tokens) != [write]:
        raise NotByRow(Reason.NO_SUM, write)
    readers = [user for user in tokens.users if user is not write]
    if len(readers) != 1 or torch_name(readers[0]) not in FORMS:
        raise NotByRow(Reason.NO_SUM, write)
    assert isinstance(order, fx.Node)
    by_token, shape = readers[0], shape_of(readers[0])
    grouped = len(shape) == 3 and shape[2:] == shape_of(tokens)[1:] == shape_of(rows)[1:]
    later = dependence.position[by_token] > dependence.position[write]
    alike = type_of(by_token) is type_of(tokens) is type_of(rows)
    if not (grouped and later and alike):
        raise NotByRow(Reason.NO_SUM, by_token)
    reader = only_reader(by_token)
    if torch_name(reader) != "sum":
        return _weighted(by_token, order, (tokens, write, by_token))
    given = arguments_of(reader, "sum", "input", "dim", "keepdim", "dtype") or {}
    flat = given.get("dim") in ROWS_OF_TOKENS and not given.get("keepdim")
    if not flat or type_of(reader) is not type_of(rows):
        raise NotByRow(Reason.NO_SUM, reader)
    return TokenSum(
        total=reader,
        index=order,
        is_order=True,
        num_slots=shape[1],
        tail=(tokens, write, by_token, reader),
    )


def _weighted(by_token: fx.Node, order: fx.Node, before: tuple[fx.Node, ...]) -> TokenSum:
    """Read `bmm(weights [T, 1, k], rows [T, k, D])`, casts around it, `[T, D]` at the end."""
    tail, node = [*before], by_token
    while _is_cast(user := only_reader(node)):
        tail.append(user)
        node = user
    given = arguments_of(user, "bmm", "input", "mat2") or {}
    weights = given.get("input")
    if given.get("mat2") is not node or not isinstance(weights, fx.Node):
        raise NotByRow(Reason.NO_SUM, user)
    if shape_of(weights) != [num_rows(by_token), 1, shape_of(by_token)[1]]:
        raise NotByRow(Reason.NO_SUM, user)
    wide = type_of(weights)
    if any(not _holds(type_of(n), type_of(n.args[0]), wide) for n in tail[len(before) :]):
        raise NotByRow(Reason.NO_SUM, user)
    if not type_of(node) is type_of(user) is wide:
        raise NotByRow(Reason.NO_SUM, user)
    tail += _squeezed(user)
    if any(type_of(n) not in (wide, type_of(tail[-1])) for n in tail[tail.index(user) :]):
        raise NotByRow(Reason.NO_SUM, tail[-1])
    return TokenSum(
        total=tail[-1],
        index=order,
        is_order=True,
        num_slots=shape_of(by_token)[1],
        weights=weights,
        tail=tuple(tail),
    )


def _squeezed(product: fx.Node) -> list[fx.Node]:
    """Return `product`, `[T, 1, D]`, and what makes it `[T, D]`, in order."""
    found = [product]
    while len(shape_of(found[-1])) == 3:
        node = only_reader(found[-1])
        given = arguments_of(node, "squeeze", "input", "dim") or {}
        if given.get("dim") not in (1, -2) and not _is_cast(node):
            raise NotByRow(Reason.NO_SUM, node)
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
