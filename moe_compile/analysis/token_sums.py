"""What follows a combine when it is a sum per token: rows added by index, or put in order first.

Contract
    A `TokenSum` says which rows are added up for a token, and by which weights; the graph is not
    edited. Two forms are known:

    base.index_add(0, index, rows)
    z = zeros; z[order] = rows; z.reshape(tokens, k, width), then sum(1) or bmm with the weights
"""

from __future__ import annotations

import operator
from typing import Final

import torch
import torch.fx as fx

from moe_compile.analysis.row_chain import NotByRow, RowChain, num_rows, only_reader, shape_of
from moe_compile.analysis.token_regions import TokenSum, Unswitched
from moe_compile.graph.query import argument_of, called_name

ZEROS: Final = frozenset({"zeros", "zeros_like", "new_zeros"})
FORMS: Final = frozenset({"reshape", "view", "unflatten"})


def find_token_sum(result: fx.Node) -> tuple[RowChain, TokenSum]:
    """Return what changes the rows of `result` one by one, and the sum per token after that.

    Raises NotByRow where there is no such sum.
    """
    chain = RowChain()
    node = result
    while True:
        user = only_reader(node)
        if _is_index_add(user):
            return chain, _index_add(user, node)
        if user.target is operator.setitem:
            return chain, _in_order(user, node)
        if chain.add(user, Unswitched.NO_SUM) is not node:
            raise NotByRow(Unswitched.NOT_BY_ROW, user)
        node = user


def _is_index_add(node: fx.Node) -> bool:
    no_scale = argument_of(node, 4, "alpha") in (None, 1)
    along_rows = argument_of(node, 1, "dim") == 0
    return called_name(node) == "index_add" and along_rows and no_scale


def _index_add(total: fx.Node, rows: fx.Node) -> TokenSum:
    base, index = argument_of(total, 0, "input"), argument_of(total, 2, "index")
    if argument_of(total, 3, "source") is not rows or base is rows:
        raise NotByRow(Unswitched.NO_SUM, total)
    is_zeros = called_name(base) in ZEROS
    return TokenSum(
        total=total, index=index, is_order=False, base=None if is_zeros else base, tail=(total,)
    )


def _in_order(write: fx.Node, rows: fx.Node) -> TokenSum:
    """Read the form that puts rows in order, `k` to a token, and sums these."""
    target, order, written = write.args
    tokens = target if isinstance(target, fx.Node) else rows
    readers = [user for user in tokens.users if user is not write]
    known = called_name(tokens) in ZEROS and written is rows and isinstance(order, fx.Node)
    if not known or len(readers) != 1 or called_name(readers[0]) not in FORMS:
        raise NotByRow(Unswitched.NO_SUM, write)
    assert isinstance(order, fx.Node)
    by_token, shape = readers[0], shape_of(readers[0])
    if len(shape) != 3 or shape[2:] != shape_of(tokens)[1:]:
        raise NotByRow(Unswitched.NO_SUM, by_token)
    reader = only_reader(by_token)
    if called_name(reader) == "sum" and argument_of(reader, 1, "dim") in (1, [1], (1,)):
        found = (by_token, reader)
        return TokenSum(total=reader, index=order, is_order=True, tail=(tokens, write, *found))
    return _weighted(by_token, order, (tokens, write, by_token))


def _weighted(by_token: fx.Node, order: fx.Node, before: tuple[fx.Node, ...]) -> TokenSum:
    """Read `bmm(weights [T, 1, k], rows [T, k, D])`, casts around it, `[T, D]` at the end."""
    tail, node = [*before], by_token
    casts = RowChain()
    while called_name(user := only_reader(node)) != "bmm":
        casts.add(user, Unswitched.NO_SUM)
        tail.append(user)
        node = user
    weights = user.args[0]
    if user.target is not torch.bmm or user.args[1] is not node or not isinstance(weights, fx.Node):
        raise NotByRow(Unswitched.NO_SUM, user)
    if shape_of(weights) != [num_rows(by_token), 1, shape_of(by_token)[1]]:
        raise NotByRow(Unswitched.NO_SUM, user)
    tail.append(user)
    while len(shape_of(tail[-1])) == 3:
        node = only_reader(tail[-1])
        if (called_name(node), *node.args[1:]) not in (("squeeze", 1), ("squeeze", -2)):
            casts.add(node, Unswitched.NO_SUM)
        tail.append(node)
    if casts.factors:
        raise NotByRow(Unswitched.NO_SUM, casts.nodes[0])
    return TokenSum(total=tail[-1], index=order, is_order=True, weights=weights, tail=tuple(tail))
