"""Where the rows of a region come from and go to: a gather of tokens, and a sum per token.

Contract
    A `TokenRows` says: row r of the dispatch is `tokens[index[r]]`, changed row by row, and what
    follows the combine adds the results, changed row by row, to their tokens: all that is needed
    to move tokens instead of rows. The graph is not edited.

    tokens[index] -> before -> region -> after -> index_add(base, 0, index, ..)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Final

import torch
import torch.fx as fx

from moe_compile.analysis.regions import MoERegion
from moe_compile.analysis.surroundings import changes_state
from moe_compile.analysis.token_index import (
    chosen_of,
    counts_values,
    is_same_value,
    rows_of_each_token,
)
from moe_compile.analysis.token_regions import NotFound, TokenRows, Unswitched
from moe_compile.graph.dependence import Dependence, storages
from moe_compile.graph.query import argument_of, called_name, expression_of, tensor_of

CASTS: Final = frozenset({"to", "float", "bfloat16", "half", "double", "contiguous"})
PRODUCTS: Final = (operator.mul, torch.mul, "mul")
WHOLE_ROW: Final = slice(None, None, None)
ZEROS: Final = frozenset({"zeros", "zeros_like", "new_zeros"})


def find_token_rows(region: MoERegion) -> TokenRows | NotFound:
    """Return where the rows of `region` come from and go to, or why a switch must not be made."""
    try:
        found = _find(region)
    except _Stopped as stopped:
        return stopped.found
    dependence = Dependence(region.result.graph)
    kept = [found.tokens, found.index, region.counts, *found.factors]
    kept += [found.base] if found.base is not None else []
    for node in kept:
        writer = _writer(dependence, node)
        if writer is not None:
            return NotFound(reason=Unswitched.WRITTEN, detail=f"{node.name} by {writer.name}")
    if (change := _state_change(found.gather, found.total)) is not None:
        return NotFound(reason=Unswitched.STATE_CHANGES, detail=change.name)
    return found


class _Stopped(Exception):
    """The search ended without a gather and a sum."""

    def __init__(self, reason: Unswitched, node: fx.Node) -> None:
        super().__init__(node.name)
        self.found = NotFound(reason=reason, detail=f"{node.name}: {node.target}")


@dataclass(slots=True)
class _Chain:
    """Nodes that change rows one by one, and the factors they read."""

    nodes: list[fx.Node]
    factors: list[fx.Node]


def _find(region: MoERegion) -> TokenRows:
    gather, before = _up_to_gather(region.rows)
    tokens, index = _gathered(gather)
    total, after, last = _down_to_sum(region.result)
    base, summed_by = _summed(total, last)
    if not is_same_value(index, summed_by):
        raise _Stopped(Unswitched.OTHER_INDEX, total)
    if _rows(total) != _rows(tokens):
        raise _Stopped(Unswitched.OTHER_TOKENS, total)
    for factor in (*before.factors, *after.factors):
        if _rows(factor) != _rows(index):
            raise _Stopped(Unswitched.NOT_BY_ROW, factor)
    chosen = chosen_of(index)
    return TokenRows(
        tokens=tokens,
        index=index,
        gather=gather,
        before=tuple(reversed(before.nodes)),
        after=tuple(after.nodes),
        factors=tuple(dict.fromkeys([*before.factors, *after.factors])),
        total=total,
        base=None if _is_zeros(base) else base,
        rows_per_token=rows_of_each_token(index, tokens),
        is_chosen_once=chosen is not None and counts_values(region.counts, chosen),
    )


def _up_to_gather(rows: fx.Node) -> tuple[fx.Node, _Chain]:
    chain = _Chain([], [])
    node = rows
    while _gather_index(node) is None:
        if len(node.users) != 1:
            raise _Stopped(Unswitched.ROWS_READ, node)
        row, factors = _row_and_factors(node, Unswitched.NO_GATHER)
        chain.nodes.append(node)
        chain.factors += factors
        node = row
    if len(node.users) != 1:
        raise _Stopped(Unswitched.ROWS_READ, node)
    return node, chain


def _down_to_sum(result: fx.Node) -> tuple[fx.Node, _Chain, fx.Node]:
    """Return the sum, what stands before it, and the last of that."""
    chain = _Chain([], [])
    node = result
    while True:
        if len(node.users) != 1:
            raise _Stopped(Unswitched.ROWS_READ, node)
        (user,) = node.users
        if _is_index_add(user):
            return user, chain, node
        row, factors = _row_and_factors(user, Unswitched.NO_SUM)
        if row is not node:
            raise _Stopped(Unswitched.NOT_BY_ROW, user)
        chain.nodes.append(user)
        chain.factors += factors
        node = user


def _row_and_factors(node: fx.Node, otherwise: Unswitched) -> tuple[fx.Node, list[fx.Node]]:
    """Return the rows that `node` changes row by row, and the factors it multiplies them by."""
    inputs = node.all_input_nodes
    if node.op == "call_method" and node.target in CASTS and len(inputs) == 1:
        return inputs[0], []
    if node.target not in PRODUCTS or node.kwargs:
        raise _Stopped(otherwise, node)
    if len(inputs) == 1 and len(node.args) == 2 and node.args[0] is not node.args[1]:
        return inputs[0], []  # a number for all
    is_factor = [_shape(i)[1:] == [1] for i in inputs]
    if len(inputs) == 2 and sum(is_factor) == 1:
        return inputs[is_factor.index(False)], [inputs[is_factor.index(True)]]
    raise _Stopped(Unswitched.NOT_BY_ROW, node)


def _gather_index(node: fx.Node) -> fx.Node | None:
    """Return the vector of integers by which `node` gathers rows of a matrix."""
    index: object = None
    if node.target is operator.getitem:
        index = node.args[1]
        if isinstance(index, tuple) and index[1:] == (WHOLE_ROW,):
            index = index[0]
    elif called_name(node) == "index_select" and argument_of(node, 1, "dim") == 0:
        index = argument_of(node, 2, "index")
    tensor = tensor_of(index) if isinstance(index, fx.Node) else None
    if tensor is None or tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
        return None
    source = tensor_of(node.all_input_nodes[0])
    return (
        index if isinstance(index, fx.Node) and source is not None and source.dim() == 2 else None
    )


def _gathered(gather: fx.Node) -> tuple[fx.Node, fx.Node]:
    index = _gather_index(gather)
    assert index is not None
    return gather.all_input_nodes[0], index


def _is_index_add(node: fx.Node) -> bool:
    no_scale = argument_of(node, 4, "alpha") in (None, 1)
    return called_name(node) == "index_add" and argument_of(node, 1, "dim") == 0 and no_scale


def _summed(total: fx.Node, last: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return what `total` adds rows to, and by which index."""
    base, index, rows = (
        argument_of(total, i, name) for i, name in ((0, "input"), (2, "index"), (3, "source"))
    )
    if rows is not last or base is last or not isinstance(base, fx.Node):
        raise _Stopped(Unswitched.NO_SUM, total)
    assert isinstance(index, fx.Node)
    return base, index


def _is_zeros(node: fx.Node) -> bool:
    return called_name(node) in ZEROS


def _shape(node: fx.Node) -> list[object]:
    tensor = tensor_of(node)
    return [] if tensor is None else [expression_of(size) for size in tensor.shape]


def _rows(node: fx.Node) -> object:
    return next(iter(_shape(node)), None)


def _writer(dependence: Dependence, node: fx.Node) -> fx.Node | None:
    mine = storages(node)
    return next((w for w, written in dependence.writes.items() if written & mine), None)


def _state_change(first: fx.Node, last: fx.Node) -> fx.Node | None:
    """Return a change of mode between two nodes, but for grad mode switched off and on again."""
    grad_modes: list[object] = []
    change, node = None, first
    while node is not last:
        node = node.next
        if changes_state(node):
            change = node
            if "grad_enabled" not in getattr(node.target, "__name__", ""):
                return node
            grad_modes.append(node.args[0])
    off_and_on = grad_modes[:1] == [False] and grad_modes[-1:] == [True]
    return None if off_and_on else change
