"""The source and the end of a region's rows: a gather of tokens, and a sum per token.

Contract
    A `TokenRows` says: row r of the dispatch is `tokens[index[r]]`, changed row by row, and the
    nodes after the combine add the results, changed row by row, to their tokens. This is enough
    to move tokens instead of rows. The graph is not edited.

    tokens[index] -> before -> region -> after -> sums of the rows of each token
"""

from __future__ import annotations

import operator
from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.effects import may_attend
from moe_compile.graph.modes import changes_mode, chooses_attention
from moe_compile.graph.query import operator_at, tensor_of
from moe_compile.graph.torch_calls import arguments_of
from moe_compile.journal.reasons import Left, Reason
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.row_chain import RowChain, num_rows, only_reader, shape_of, type_of
from moe_compile.regions.token_counts import counts_values
from moe_compile.regions.token_index import (
    TokenIndex,
    is_same_value,
    mean_rows_per_token,
    repeated_in_rows,
)
from moe_compile.regions.token_regions import TokenRows
from moe_compile.regions.token_sums import find_token_sum

WHOLE_ROW: Final = slice(None, None, None)


def find_token_rows(region: MoERegion) -> TokenRows | Left:
    """Return the gather and the sums around `region`, or why its dispatch must be kept."""
    found, dependence = read_token_rows(region), region.facts.dependence
    if isinstance(found, Left):
        return found
    kept = [found.tokens, found.index, found.sums.index, region.counts, *found.factors]
    kept += [n for n in (found.sums.base, found.sums.weights) if n is not None]
    for node in kept:
        if node is region.counts and dependence.is_filled_first(node):
            continue
        if writers := dependence.writers(node):
            return Left(Reason.WRITTEN, f"{operator_at(writers[0])} writes to {operator_at(node)}")
    attends = any(map(may_attend, region.body))
    if (change := _state_change(found.gather, found.sums.total, attends=attends)) is not None:
        return Left(Reason.STATE_CHANGES, operator_at(change))
    return found


def read_token_rows(region: MoERegion) -> TokenRows | Left:
    """Return the gather and the sums around `region`, without a check of writes and modes."""
    try:
        return _find(region)
    except Left as stopped:
        return stopped


def _find(region: MoERegion) -> TokenRows:
    dependence = region.facts.dependence
    for one in (*region.beside, *region.back_beside):
        raise Left(Reason.NOT_BY_ROW, operator_at(one.launch))
    gather, before = _up_to_gather(region.rows)
    gathered = _gathered(gather)
    assert gathered is not None
    tokens, index = gathered
    after, found = find_token_sum(region.result, num_rows(region.rows), dependence)
    known = TokenIndex(dependence.written)
    of_each = known.rows_of_each_token(index, tokens)
    part = known.part_of(index) if of_each is None else None
    rows_per_token = of_each if part is None else part.rows_per_token
    summed_by = known.order_of(index) if found.is_order else index
    in_slots = not found.is_order or rows_per_token == found.num_slots
    if not in_slots or not is_same_value(summed_by, found.index, region.facts.legality):
        raise Left(Reason.OTHER_INDEX, operator_at(found.total))
    if found.needs_all and of_each is None:
        raise Left(Reason.NO_SUM, operator_at(found.tail[0]))
    if found.num_sums != num_rows(tokens):
        raise Left(Reason.OTHER_TOKENS, operator_at(found.total))
    if not _can_be_reduced(found.total, tokens):
        raise Left(Reason.NO_SUM, operator_at(found.total))
    for factor in (*before.factors, *after.factors):
        if num_rows(factor) != num_rows(index):
            raise Left(Reason.NOT_BY_ROW, operator_at(factor))
    chosen = known.chosen_of(index)
    return TokenRows(
        tokens=tokens,
        index=index,
        gather=gather,
        before=tuple(reversed(before.nodes)),
        after=tuple(after.nodes),
        factors=tuple(dict.fromkeys([*before.factors, *after.factors])),
        sums=found,
        rows_per_token=rows_per_token,
        part=part,
        mean_rows_per_token=None if part else of_each or mean_rows_per_token(index, tokens),
        is_chosen_once=chosen is not None
        and counts_values(known, region.counts, chosen, dependence),
        chosen=chosen,
        keeps_order=known.is_sorted_stably(index),
    )


def _can_be_reduced(total: fx.Node, tokens: fx.Node) -> bool:
    """Whether the sums are a floating-point matrix on the device of the tokens."""
    sums, source = tensor_of(total), tensor_of(tokens)
    if sums is None or source is None or sums.device != source.device:
        return False
    return sums.dim() == 2 and sums.dtype.is_floating_point


def _up_to_gather(rows: fx.Node) -> tuple[fx.Node, RowChain]:
    chain = RowChain()
    node = rows
    while _gathered(node) is None:
        only_reader(node)
        node = chain.add(node, Reason.NO_GATHER)
    only_reader(node)
    return node, chain


def _gathered(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the matrix whose rows `node` gathers, and the vector of integers it indexes by."""
    source: object = None
    index: object = None
    if node.target is operator.getitem:
        source, index = node.args
        if isinstance(index, tuple) and index[1:] == (WHOLE_ROW,):
            index = index[0]
    elif given := arguments_of(node, "index_select", "input", "dim", "index"):
        source, index = (given.get(name) for name in ("input", "index"))
        if given.get("dim") != 0:
            return None
    elif given := arguments_of(node, "gather", "input", "dim", "index"):
        source, index = given.get("input"), repeated_in_rows(given.get("index"))
        if given.get("dim") not in (0, -2) or shape_of(node)[1:] != shape_of(source)[1:]:
            return None
    if not isinstance(source, fx.Node) or not isinstance(index, fx.Node):
        return None
    is_vector = len(shape_of(index)) == 1 and type_of(index) in (torch.int32, torch.int64)
    return (source, index) if is_vector and len(shape_of(source)) == 2 else None


def _state_change(first: fx.Node, last: fx.Node, *, attends: bool) -> fx.Node | None:
    """Return a change of mode between two nodes, except grad mode switched off and on again.

    Unless the region `attends`, a choice of the attention backend is allowed too.
    """
    grad_modes: list[object] = []
    change, node = None, first
    while node is not last:
        node = node.next
        if changes_mode(node) and (attends or not chooses_attention(node)):
            change = node
            if "grad_enabled" not in getattr(node.target, "__name__", ""):
                return node
            grad_modes.append(node.args[0])
    off_and_on = grad_modes[:1] == [False] and grad_modes[-1:] == [True]
    return None if off_and_on else change
