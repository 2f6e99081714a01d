"""Sums of the rows that a combine brought per token as one operator: found, and emitted.

Contract
    A `FusedSums` names nodes of one graph and is stale once that graph is edited.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from sympy import sympify

from moe_compile.graph.edit import Emitter
from moe_compile.graph.legality import Legality
from moe_compile.graph.query import number_of, operator_at, tensor_of
from moe_compile.journal.entries import Verdict
from moe_compile.journal.reasons import Left, Reason
from moe_compile.ops.permute import PERMUTE_ROWS
from moe_compile.ops.row_sums import TOKEN_SUMS
from moe_compile.regions.row_chain import num_rows, shape_of
from moe_compile.regions.token_index import TokenIndex
from moe_compile.regions.token_regions import TokenSum
from moe_compile.regions.token_sums import ONES, find_token_sum, is_made


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedSums:
    """A sum per token that becomes one operator, and the nodes it replaces."""

    result: fx.Node
    """The rows that came back, in the order sent."""
    sums: TokenSum
    rows: tuple[fx.Node, ...]
    """The rows that came back; one node per chunk where chunks are joined for the sum alone."""
    inverse: fx.Node | None
    """Index of each of `rows` among the rows that are summed; None where these are the same."""
    order: fx.Node
    """The order of the rows: a permutation of the places of the tokens that have rows."""
    first: int | None
    """The first of the tokens that have rows, which are consecutive; None where all have rows."""
    dead: tuple[fx.Node, ...]
    """Nodes that nothing needs once the new operator is there."""


def fused_sums_of(result: fx.Node, num_sent: object, legality: Legality) -> FusedSums | Verdict:
    """Return the fused form of the sums of `result` per token, or the refusal."""
    try:
        _, sums = find_token_sum(result, num_sent, legality.dependence)
        order, first = _order_and_first(sums, legality)
        if is_made(sums.weights, ONES):
            sums = replace(sums, weights=None)
    except Left as stopped:
        found = stopped
        return Verdict(candidate="", reason=found.reason, detail=found.detail)
    permuted = sums.rows
    old, rows, inverse = sums.tail, [sums.rows], None
    if permuted.target is PERMUTE_ROWS and {*permuted.users} <= {*sums.tail}:
        whole, _, inverse = permuted.args
        old, rows = (permuted, *old), [whole]
        if whole.target is torch.cat and len(whole.users) == 1 and len(whole.args) == 1:
            old, rows = (whole, *old), whole.args[0]
    if (obstacle := legality.obstacle(old, sums.total)) is not None:
        return Verdict(candidate="", reason=obstacle.left.reason, detail=str(obstacle))
    read = [node for node in (*rows, order, sums.weights, inverse) if node is not None]
    return FusedSums(
        result=result,
        sums=sums,
        rows=tuple(rows),
        inverse=inverse,
        order=order,
        first=first,
        dead=tuple(legality.unneeded(old, {sums.total: None}, read_anew=read)),
    )


def _order_and_first(sums: TokenSum, legality: Legality) -> tuple[fx.Node, int | None]:
    """Return the order of the rows, and the first token that has rows; None where all have.

    Raises Left unless the tokens that have rows are consecutive and have `k` each.
    """
    known = TokenIndex(legality.dependence.written)
    rows, num_terms = tensor_of(sums.rows), number_of(sums.num_slots)
    if not sums.is_order or num_terms is None:
        raise Left(Reason.NO_SLOTS, operator_at(sums.total))
    is_matrix = rows is not None and rows.dim() == 2 and type(rows.shape[1]) is int
    if not is_matrix or len(shape_of(sums.total)) != 2:
        raise Left(Reason.NO_SUM, operator_at(sums.total))
    is_whole = num_rows(sums.index) == sympify(sums.num_sums) * num_terms
    if is_whole and known.is_permutation(sums.index):
        return sums.index, None
    order, shift = known.unshifted(sums.index)
    numbers = number_of(shift), number_of(num_rows(order)), number_of(sums.num_sums)
    first = _first(*numbers, num_terms)
    if sums.needs_all or first is None or not known.is_permutation(order):
        raise Left(Reason.NO_SLOTS, operator_at(sums.index))
    return order, first


def _first(
    shift: int | None, num_sent: int | None, num_tokens: int | None, num_terms: int
) -> int | None:
    """Return the first token if `num_sent` places from `shift` on are those of whole tokens."""
    if shift is None or num_sent is None or num_tokens is None:
        return None
    (first, before), (number, over) = divmod(shift, num_terms), divmod(num_sent, num_terms)
    return first if before == over == 0 <= first <= num_tokens - number else None


def emit_sums(
    emit: Emitter, form: FusedSums, at: Callable[[fx.Node], fx.Node] = lambda node: node
) -> fx.Node:
    """Emit the operator, and return the node that replaces the sums.

    `at` maps the nodes that it reads to the emitter's graph, if that is another one.
    """
    sums, first, num_terms = form.sums, form.first, number_of(form.sums.num_slots)
    total, num_sent = tensor_of(sums.total), number_of(num_rows(form.order))
    assert total is not None and num_terms is not None
    order, weights = at(form.order), None if sums.weights is None else at(sums.weights)
    if num_sent is not None:
        num_tokens: Any = num_sent // num_terms
    else:
        num_tokens = emit.call(operator.floordiv, emit.method("size", order, 0), num_terms)
    if first is not None and weights is not None:
        weights = emit.method("reshape", weights, -1)
        weights = emit.call(torch.narrow, weights, 0, first * num_terms, num_sent)
    if form.inverse is not None:
        order = emit.call(operator.getitem, order, at(form.inverse))
    rows = [at(one) for one in form.rows]
    made = emit.call(TOKEN_SUMS, rows, order, weights, num_tokens, num_terms, total.dtype)
    if first is None:
        return made
    behind = int(sympify(sums.num_sums)) - first - num_tokens
    return emit.call(torch.nn.functional.pad, made, (0, 0, first, behind))
