"""Inputs of an attention region: those with heads are cut, others are the same for all groups.

Contract
    Gradients of inputs are those of the whole region, bit for bit, or the region is refused;
    where groups may round differently anyway, so may gradients of inputs that no exchange brings.

The gradient of a cut input is a concatenation of the gradients of groups. Where the region
reads it several times, a group adds up its own terms before anything else is added to them.
Attention gives gradients a memory layout of its own, which shows in the last bits of sums over
them; an exchange gives the same layout to those of the whole and of groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.dims.arguments import moved
from moe_compile.dims.factors import Factor, Lost, flat, holds
from moe_compile.dims.tracker import Tracker, is_form
from moe_compile.graph.aliases import maker, readers
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.query import has_gradient, is_launch, operator_at, value_of
from moe_compile.journal.reasons import Left, Reason


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
            raise Lost(f"{operator_at(source)} is computed after the attention")
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
        raise Lost(f"{operator_at(source)} has heads in several dimensions")
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
