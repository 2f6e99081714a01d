"""Where a region is cut in groups of heads: where it sends, or as far out as its projections.

Contract
    Of a projection cut by heads nothing else is read than the heads of the region, and everything
    between it and the exchange is proven to treat heads apart.
    The product that makes queries, keys or values is cut by features; that of the result by what
    it sums over, so that its groups are added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch.fx as fx

from moe_compile.attention.attention_regions import AttentionRegion
from moe_compile.attention.attention_surroundings import movements_above
from moe_compile.attention.head_factors import Factor, Lost, holds
from moe_compile.attention.head_proof import (
    Refuse,
    check_escapes,
    check_heads_stay,
    check_meanwhile,
    find_heads,
    has_factor,
    track,
)
from moe_compile.attention.head_rules import is_per_head
from moe_compile.attention.head_tracking import Tracker, is_movement, move_name
from moe_compile.attention.linear_layers import Linear, linear_of
from moe_compile.attention.move_arguments import values_moved
from moe_compile.graph.dependence import Dependence
from moe_compile.graph.query import is_launch, is_wait, operator_at
from moe_compile.journal.reasons import Reason


class _Refuse(Exception):
    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason.value)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSplit:
    """What is cut in groups, and what runs for each of them."""

    region: AttentionRegion
    cut: tuple[fx.Node, ...]
    """Values that every group gets its heads of."""
    projections: tuple[Linear, ...] = ()
    """Products of which every group computes its heads; all else reads nothing of them."""
    path: tuple[fx.Node, ...] = ()
    """What runs for each group between these values and the exchanges, in graph order."""
    after: tuple[fx.Node, ...] = ()
    """Movements from the result to the output projection, in the order they run."""
    output: Linear | None = None
    """The product that sums over all heads, a share for each group."""
    kept_whole: tuple[tuple[str, Reason, str], ...] = ()
    """Which projections that an option asks to cut are computed whole, why, and what is there."""

    @property
    def result(self) -> fx.Node:
        """What the groups, joined or added, replace."""
        return self.output.node if self.output else self.region.result

    @property
    def body(self) -> tuple[fx.Node, ...]:
        """What the groups replace, `result` included, in graph order."""
        first = tuple(linear.node for linear in self.projections)
        return (*first, *self.path, *self.region.body, *self.after, self.result)


def split_where_sent(region: AttentionRegion) -> HeadSplit:
    """Cut what the region reads: no bit changes."""
    return HeadSplit(region=region, cut=region.cut)


def split_projections(region: AttentionRegion, *, qkv: bool, out: bool) -> HeadSplit:
    """Cut the projections asked for where that is proven; say why where it is not."""
    dependence = Dependence(region.core.graph)
    split = split_where_sent(region)
    reasons: list[tuple[str, Reason, str]] = []
    if qkv:
        try:
            split = _with_projections(region, dependence)
        except (_Refuse, Refuse, Lost) as refusal:
            reasons.append(("projections of q, k and v", *_why(refusal)))
    if out:
        try:
            split = _with_output(split, dependence)
        except (_Refuse, Refuse, Lost) as refusal:
            reasons.append(("output projection", *_why(refusal)))
    return dataclasses.replace(split, kept_whole=tuple(reasons))


def _why(refusal: _Refuse | Refuse | Lost) -> tuple[Reason, str]:
    if isinstance(refusal, Lost):
        return Reason.HEADS_LOST, str(refusal)
    return refusal.reason, refusal.detail


def _with_projections(region: AttentionRegion, dependence: Dependence) -> HeadSplit:
    above, linears = _made_head_by_head(n.all_input_nodes[0] for n in region.exchanges)
    below = dependence.below(linear.node for linear in linears)
    brought = [o for o, source in zip(region.operands, region.sources, strict=True) if source]
    moved = {n for operand in brought for n in movements_above(operand)}
    followed = dependence.in_order(above & below | moved)
    tracker = Tracker()
    track(tracker, followed, region.local_operands)
    head = find_heads(tracker, region.core, region.operands, region.sources, region.outward)
    if head is None:
        raise _Refuse(Reason.HEADS_LOST)
    for node, dim in tracker.closed:
        if holds(dim, head):
            raise _Refuse(Reason.MIXES_HEADS, operator_at(node))
    linears.sort(key=lambda linear: dependence.position[linear.node])
    projections = tuple(li for li in linears if _in_features(tracker, li.node, head))
    if not projections:
        raise _Refuse(Reason.NO_PROJECTION)
    inside = {*region.exchanges, *region.inward}
    with_heads = [n for n in followed if n not in inside and has_factor(tracker, n, head)]
    born = [n for n in with_heads if _makes_heads(tracker, n, head)]
    check_heads_stay(tracker, (n for n in with_heads if n not in born), head)
    split = HeadSplit(
        region=dataclasses.replace(region, tracker=tracker, head=head),
        cut=(*(n for n in _roots(tracker, head) if linear_of(n) not in projections), *born),
        projections=projections,
        path=tuple(n for n in with_heads if n not in born),
    )
    _check(split, dependence)
    return split


def _made_head_by_head(sent: Iterable[fx.Node]) -> tuple[set[fx.Node], list[Linear]]:
    """Return what may be followed above `sent`, and the products by weights it ends at."""
    seen: set[fx.Node] = set()
    linears: dict[fx.Node, Linear] = {}
    todo = list(sent)
    while todo:
        node = todo.pop()
        if (linear := linear_of(node)) is not None:
            linears[node] = linear
        elif node not in seen and _is_followed(node):
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return seen, list(linears.values())


def _is_followed(node: fx.Node) -> bool:
    if is_launch(node) or is_wait(node):
        return False
    return is_movement(node) or is_per_head(node)


def _makes_heads(tracker: Tracker, node: fx.Node, head: Factor) -> bool:
    """Whether `node` has heads that nothing it reads has: it is cut, not run for each group.

    An expansion names its sizes, so that it can run for each group.
    """
    made = not any(has_factor(tracker, n, head) for n in node.all_input_nodes)
    return made and move_name(node) != "expand"


def _in_features(tracker: Tracker, node: fx.Node, head: Factor) -> bool:
    """Whether the heads are in the last dimension of `node` and in no other."""
    if node not in tracker:
        return False
    *others, features = tracker.dims(node)
    return holds(features, head) and not any(holds(dim, head) for dim in others)


def _roots(tracker: Tracker, head: Factor) -> list[fx.Node]:
    """Return the values that tracking began at and that have heads, in one dimension each."""
    found = []
    for node in tracker.started():
        dims = [dim for dim in tracker.dims(node) if holds(dim, head)]
        if len(dims) > 1:
            raise _Refuse(Reason.HEADS_LOST, operator_at(node))
        if dims:
            found.append(node)
    return found


def _check(split: HeadSplit, dependence: Dependence) -> None:
    """Refuse a split whose projections are read by others, or would run in another state."""
    projected = [linear.node for linear in split.projections]
    own = dependence.below(projected) & {*projected, *split.path}
    check_escapes(dependence.in_order(own), split.body)
    check_meanwhile(split.body, split.region.core, dependence, may_round=True)


def _with_output(split: HeadSplit, dependence: Dependence) -> HeadSplit:
    tracker, head = split.region.tracker, split.region.head
    after, output = _output_of(split.region.result)
    for node in after:
        tracker.step(node)
    if head is None or not _in_features(tracker, output.x, head):
        raise _Refuse(Reason.HEADS_LOST, operator_at(output.x))
    core = dependence.position[split.region.core]
    for node in (output.weight, output.bias):
        if node and node.op not in ("placeholder", "get_attr") and dependence.position[node] > core:
            raise _Refuse(Reason.MADE_LATE, operator_at(node))
    found = dataclasses.replace(split, after=tuple(after), output=output)
    check_meanwhile(found.body, found.region.core, dependence, may_round=True)
    return found


def _output_of(result: fx.Node) -> tuple[list[fx.Node], Linear]:
    """Return what moves `result` to the product that alone reads it, and that product."""
    after: list[fx.Node] = []
    node = result
    while len(node.users) == 1:
        following = next(iter(node.users))
        linear = linear_of(following)
        if linear is not None and linear.x is node:
            return after, linear
        if not is_movement(following) or is_launch(following) or is_wait(following):
            break
        if {*values_moved(following)} != {node}:
            break
        after.append(following)
        node = following
    raise _Refuse(Reason.NO_OUTPUT)
