"""Where the rows of a region come from and go to: a gather of tokens, and a sum per token.

Contract
    A `TokenRows` says: row r of the dispatch is `tokens[index[r]]`, changed row by row, and what
    follows the combine adds the results, changed row by row, to their tokens: all that is needed
    to move tokens instead of rows. The graph is not edited.

    tokens[index] -> before -> region -> after -> sums of the rows of each token
"""

from __future__ import annotations

import operator
from typing import Final

import torch
import torch.fx as fx

from moe_compile.analysis.regions import MoERegion
from moe_compile.analysis.row_chain import NotByRow, RowChain, num_rows, only_reader
from moe_compile.analysis.token_index import (
    chosen_of,
    counts_values,
    is_same_value,
    order_of,
    rows_of_each_token,
)
from moe_compile.analysis.token_regions import NotFound, TokenRows, Unswitched
from moe_compile.analysis.token_sums import find_token_sum
from moe_compile.graph.dependence import Dependence, storages
from moe_compile.graph.effects import changes_mode
from moe_compile.graph.query import argument_of, called_name, tensor_of

WHOLE_ROW: Final = slice(None, None, None)


def find_token_rows(region: MoERegion) -> TokenRows | NotFound:
    """Return where the rows of `region` come from and go to, or why a switch must not be made."""
    try:
        found = _find(region)
    except NotByRow as stopped:
        return stopped.found
    dependence = Dependence(region.result.graph)
    kept = [found.tokens, found.index, region.counts, *found.factors]
    kept += [n for n in (found.sums.base, found.sums.weights) if n is not None]
    for node in kept:
        writer = _writer(dependence, node)
        if writer is not None:
            return NotFound(reason=Unswitched.WRITTEN, detail=f"{node.name} by {writer.name}")
    if (change := _state_change(found.gather, found.sums.total)) is not None:
        return NotFound(reason=Unswitched.STATE_CHANGES, detail=change.name)
    return found


def _find(region: MoERegion) -> TokenRows:
    gather, before = _up_to_gather(region.rows)
    index, tokens = _gather_index(gather), gather.all_input_nodes[0]
    assert index is not None
    after, found = find_token_sum(region.result)
    rows_per_token = rows_of_each_token(index, tokens)
    if found.is_order and rows_per_token is None:
        raise NotByRow(Unswitched.OTHER_INDEX, found.total)
    if not is_same_value(order_of(index) if found.is_order else index, found.index):
        raise NotByRow(Unswitched.OTHER_INDEX, found.total)
    if num_rows(found.total) != num_rows(tokens):
        raise NotByRow(Unswitched.OTHER_TOKENS, found.total)
    for factor in (*before.factors, *after.factors):
        if num_rows(factor) != num_rows(index):
            raise NotByRow(Unswitched.NOT_BY_ROW, factor)
    chosen = chosen_of(index)
    return TokenRows(
        tokens=tokens,
        index=index,
        gather=gather,
        before=tuple(reversed(before.nodes)),
        after=tuple(after.nodes),
        factors=tuple(dict.fromkeys([*before.factors, *after.factors])),
        sums=found,
        rows_per_token=rows_per_token,
        is_chosen_once=chosen is not None and counts_values(region.counts, chosen),
    )


def _up_to_gather(rows: fx.Node) -> tuple[fx.Node, RowChain]:
    chain = RowChain()
    node = rows
    while _gather_index(node) is None:
        only_reader(node)
        node = chain.add(node, Unswitched.NO_GATHER)
    only_reader(node)
    return node, chain


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


def _writer(dependence: Dependence, node: fx.Node) -> fx.Node | None:
    mine = storages(node)
    return next((w for w, written in dependence.writes.items() if written & mine), None)


def _state_change(first: fx.Node, last: fx.Node) -> fx.Node | None:
    """Return a change of mode between two nodes, but for grad mode switched off and on again."""
    grad_modes: list[object] = []
    change, node = None, first
    while node is not last:
        node = node.next
        if changes_mode(node):
            change = node
            if "grad_enabled" not in getattr(node.target, "__name__", ""):
                return node
            grad_modes.append(node.args[0])
    off_and_on = grad_modes[:1] == [False] and grad_modes[-1:] == [True]
    return None if off_and_on else change
