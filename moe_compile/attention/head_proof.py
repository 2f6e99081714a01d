"""Proofs that a factor is the index of heads, and that a region may be replayed in place.

Contract
    Raises Left or Lost where the proof fails; the graph is not edited.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import torch.fx as fx

from moe_compile.attention.attention_effects import movements_above
from moe_compile.dims.arguments import argument, operator_name, values_moved
from moe_compile.dims.factors import (
    Dims,
    Factor,
    Lost,
    flat,
    group_size,
    holds,
    unify,
)
from moe_compile.dims.tracker import CUTS, Tracker, is_movement
from moe_compile.graph.query import is_launch, operator_at
from moe_compile.journal.reasons import Left, Reason

REPETITIONS: Final = frozenset({"expand", "repeat_interleave"})


def no_region(detail: str) -> Left:
    """Return the refusal of attention as no region; `detail` is about the exchanges around it."""
    return Left(Reason.NOT_BETWEEN_EXCHANGES, detail)


def track(tracker: Tracker, moved: Sequence[fx.Node], local: Sequence[fx.Node]) -> None:
    """Follow factors through `moved`, in graph order, from its inputs; begin at `local` too."""
    for node in moved:
        tracker.follow(node)
    for operand in local:
        if operand not in tracker:
            tracker.start(operand)


def find_heads(
    tracker: Tracker,
    core: fx.Node,
    operands: Sequence[fx.Node],
    sources: Sequence[fx.Node | None],
    outward: Sequence[fx.Node],
) -> Factor | None:
    """Return the factor that is the index of KV heads; refuses exchanges that do not move heads.

    None when there is one KV head, repeated after the exchange or not.
    """
    query, key, value = operands
    unify(tracker.dims(key)[-3], tracker.dims(value)[-3])
    unify(tracker.dims(key)[-3], tracker.dims(query)[-3], prefix=True)
    heads = tracker.dims(query)[-3]
    first = sources[0]
    if first is None or not _sends_heads(tracker, first, heads):
        raise no_region("the exchange before it does not send heads to other ranks")
    for operand, source in zip(operands, sources, strict=True):
        if source and tracker.dims(operand)[-2][:1] != flat([tracker.source[source]])[:1]:
            said = "the exchange before it does not gather the sequence"
            raise no_region(f"{said}: {operator_at(operand)}")
    tracker.result_of_attention(core, query, value)
    track(tracker, outward, ())
    back = next(n for n in outward if is_launch(n))
    if flat(tracker.sent[back]) != flat([tracker.source[first]]):
        raise no_region("the exchange back does not split the sequence that was gathered")
    kv_heads = tracker.dims(key)[-3]
    head = kv_heads[0] if kv_heads else None
    if head is not None and not any(head in dim for dim in tracker.dims(outward[-1])):
        raise Lost("the heads cannot be found in the dimensions of the result")
    sent = [source.all_input_nodes[0] for source in sources if source]
    if head is None or all(has_factor(tracker, n, head) for n in sent):
        return head
    if any(_repeats_into(tracker, node, head) for node in movements_above(key)):
        return None
    raise Lost("the heads are not in the dimensions of the tensor that is sent")


def has_factor(tracker: Tracker, node: fx.Node, factor: Factor) -> bool:
    """Whether `factor` is in some dimension of `node`."""
    return any(holds(dim, factor) for dim in tracker.dims(node))


def _repeats_into(tracker: Tracker, node: fx.Node, factor: Factor) -> bool:
    """Whether `node` makes the index `factor` by repeating a tensor that has one index only."""
    if operator_name(node) not in REPETITIONS or node not in tracker:
        return False
    return has_factor(tracker, node, factor) and not has_factor(
        tracker, node.all_input_nodes[0], factor
    )


def _sends_heads(tracker: Tracker, exchange: fx.Node, heads: list[Factor]) -> bool:
    """Whether the ranks that `exchange` sends to are outermost in an index ending in `heads`."""
    sent = flat(tracker.sent[exchange])
    return any(
        dim[i : i + len(sent) + len(heads)] == sent + heads
        for node in tracker.started()
        for dim in tracker.dims(node)
        for i in range(len(dim))
    )


def check_heads_stay(tracker: Tracker, moves: Iterable[fx.Node], head: Factor) -> None:
    """Refuse a movement whose result has heads that its input lacks, or fewer of them.

    It would run unchanged for a group, and make all heads again. Only an expansion
    gets the sizes of the group.
    """
    if any(holds(dim, head) for _, dim in tracker.closed):
        raise Lost("an operator joins heads")
    for node in moves:
        if operator_name(node) == "expand" or not is_movement(node):
            continue
        if operator_name(node) in CUTS:
            pieces = tracker.pieces_of(node)
            made, given = sum(_share(dims, head) for dims in pieces), [node]
        elif node.target is operator.getitem:
            continue
        else:
            made, given = _share(tracker.dims(node), head), values_moved(node)
        times = argument(node, "repeats") if operator_name(node) == "repeat_interleave" else 1
        if made != times * sum(_share(tracker.dims(source), head) for source in given):
            raise Lost(f"{operator_at(node)} changes the number of heads")


def _share(dims: Dims, head: Factor) -> int:
    """Return the number of elements of a tensor for one head."""
    return math.prod(group_size(dim, head, 1) for dim in dims)


def check_escapes(nodes: Iterable[fx.Node], body: Collection[fx.Node]) -> None:
    """Refuse when one of `nodes` is read outside `body`."""
    inside = set(body)
    for node in nodes:
        if any(user not in inside for user in node.users):
            raise Left(Reason.ESCAPES, operator_at(node))
