"""Proofs that a factor is the index of heads, and that a region may be replayed in place.

Contract
    Raises Left or Lost where the proof fails; the graph is not edited.
    Inputs of an attention region with heads are cut, others are the same for all groups of heads.
    Gradients of inputs are those of the whole region, bit for bit, or the region is refused;
    where groups may round differently anyway, so may gradients of inputs that no exchange brings.
    The collectives next to an attention operator are read off the graph's structure.

The gradient of a cut input is a concatenation of the gradients of groups. Where the region
reads it several times, a group adds up its own terms before anything else is added to them.
Attention gives gradients a memory layout of its own, which shows in the last bits of sums over
them; an exchange gives the same layout to those of the whole and of groups.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.dims.arguments import argument, moved, operator_name, values_moved
from moe_compile.dims.factors import (
    Dims,
    Factor,
    Lost,
    flat,
    group_size,
    holds,
    unify,
)
from moe_compile.dims.tracker import CUTS, Tracker, is_form, is_movement
from moe_compile.graph.aliases import maker, readers
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.query import (
    has_gradient,
    is_all_gather,
    is_launch,
    operator_at,
    overload_name,
    value_of,
)
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
        raise no_region("the exchange before it must send heads to other ranks, and does not")
    for operand, source in zip(operands, sources, strict=True):
        if source and tracker.dims(operand)[-2][:1] != flat([tracker.source[source]])[:1]:
            said = "the exchange before it must gather the whole sequence, and does not"
            raise no_region(f"{said}: {operator_at(operand)}")
    tracker.result_of_attention(core, query, value)
    track(tracker, outward, ())
    back = next(n for n in outward if is_launch(n))
    if flat(tracker.sent[back]) != flat([tracker.source[first]]):
        raise no_region(
            "the exchange after it must split the sequence that was gathered before it, and "
            "does not"
        )
    kv_heads = tracker.dims(key)[-3]
    head = kv_heads[0] if kv_heads else None
    if head is not None and not any(head in dim for dim in tracker.dims(outward[-1])):
        raise Lost("no dimension of the result can be proven to be the dimension of heads")
    sent = [source.all_input_nodes[0] for source in sources if source]
    if head is None or all(has_factor(tracker, n, head) for n in sent):
        return head
    if any(_repeats_into(tracker, node, head) for node in movements_above(key)):
        return None
    raise Lost("no dimension of the tensor that the all-to-all sends is a dimension of heads")


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
            raise Lost(f"{operator_at(node)} changes the number of heads, which must stay the same")


def _share(dims: Dims, head: Factor) -> int:
    """Return the number of elements of a tensor for one head."""
    return math.prod(group_size(dim, head, 1) for dim in dims)


def check_escapes(nodes: Iterable[fx.Node], body: Collection[fx.Node]) -> None:
    """Refuse when one of `nodes` is read outside `body`."""
    inside = set(body)
    for node in nodes:
        if any(user not in inside for user in node.users):
            raise Left(Reason.ESCAPES, operator_at(node))


def nearest_launches(start: fx.Node, *, up: bool) -> list[fx.Node]:
    """Return the first launches met from `start` against or along the data flow."""
    seen: set[fx.Node] = set()
    found, todo = [], [start]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_launch(node):
            found.append(node)
        else:
            todo.extend(node.all_input_nodes if up else node.users)
    return found


def is_tensor_parallel(core: fx.Node) -> bool:
    """Whether the inputs of `core` come from a gather, and its result goes to a reduction."""
    is_gathered = any(map(is_all_gather, nearest_launches(core, up=True)))
    return is_gathered and any(
        "reduce" in overload_name(n) for n in nearest_launches(core, up=False)
    )


def movements_above(operand: fx.Node) -> set[fx.Node]:
    """Return the movements of data above `operand`, and itself when it is one."""
    seen: set[fx.Node] = set()
    todo = [operand]
    while todo:
        node = todo.pop()
        if node not in seen and is_movement(node):
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return seen


def heads_read(
    tracker: Tracker,
    head: Factor,
    body: Sequence[fx.Node],
    core: fx.Node,
    facts: GraphFacts,
    *,
    may_round: bool,
) -> list[fx.Node]:
    """Return the inputs from outside of `body`, in the order it is to run, that have heads.

    Refuses an input made only after `core`, where the groups run, and a gradient that groups would
    add up in another order; with `may_round` not that of an input that no exchange brings.
    """
    found, position = [], facts.dependence.position
    for source, by in read_from_outside(body).items():
        if position[source] > position[core]:
            raise Lost(
                f"{operator_at(source)} is read by the attention's region, but computed "
                "after the attention"
            )
        with_heads = _with_heads(tracker, source, head)
        terms = [reader for reader in by if has_gradient(source) and has_gradient(reader)]
        beside = not may_round and not all(map(is_launch, terms))
        if beside or (terms and not _all_hold(with_heads, head)):
            raise Left(Reason.GRADIENT_BESIDE, operator_at(source))
        if len(terms) > 1 and not _added_up_alone(source, terms, position):
            raise Left(Reason.GRADIENT_ORDER, operator_at(source))
        if with_heads:
            found.append(source)
    return found


def read_from_outside(body: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return every value that `body` reads and does not make, with its readers."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for reader in body:
        for source in _read_by(reader):
            if source not in body:
                found.setdefault(source, []).append(reader)
    return found


def _read_by(node: fx.Node) -> list[fx.Node]:
    """Return the values `node` reads, as often as it does, without those that only name a form."""
    if is_form(node):
        return [moved(node)]
    return [n for n in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(n, fx.Node)]


def _with_heads(tracker: Tracker, source: fx.Node, head: Factor) -> list[Factor]:
    """Return the factor of `source` that is the index of heads or holds it; [] without one."""
    dims = tracker.dims(source) if source in tracker else []
    found = [factor for dim in dims for factor in dim if holds([factor], head)]
    if len(found) > 1:
        raise Lost(
            f"{operator_at(source)} has heads in several dimensions, but must have them in one"
        )
    return found


def _all_hold(factors: Sequence[Factor], head: Factor) -> bool:
    """Whether `head` is among `factors`, and in every part of one that is a concatenation."""
    found = [factor for factor in flat(factors) if holds([factor], head)]
    return bool(found) and all(_all_hold(piece, head) for f in found for piece in f.pieces)


def _added_up_alone(
    source: fx.Node, by: Sequence[fx.Node], position: Mapping[fx.Node, int]
) -> bool:
    """Whether the gradient of `source` first sums terms of its readers in `by`, from the last to
    the first, and only then those of other readers."""
    others = [n for n in readers(maker(source)) if n not in by or source not in n.all_input_nodes]
    first = position[by[0]]
    late = any(position[n] > first and (value_of(n) is None or has_gradient(n)) for n in others)
    in_order = all(position[a] <= position[b] for a, b in itertools.pairwise(by))
    return in_order and not late
