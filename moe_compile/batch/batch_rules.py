"""Follow factors through what stands around experts: routers, attention, masks, embeddings.

Contract
    Adds to `capacity/expert_rules.py` operators that a whole block is written with. One that
    neither knows raises Lost. What makes an element depend on all indices of a dimension is noted
    in `Tracker.closed`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Final

import torch.fx as fx

from moe_compile.attention.head_factors import Dims, Factor, Lost, size_of, unify
from moe_compile.attention.head_rules import CASTS, operator_name, pointwise
from moe_compile.attention.move_arguments import from_left, moved
from moe_compile.batch.attention_rules import FUSED, attention, flex_attention, operand
from moe_compile.batch.sharded_rules import sharded_rule
from moe_compile.capacity import expert_rules
from moe_compile.capacity.expert_tracking import ExpertTracker
from moe_compile.graph.constant_tensors import maker_of
from moe_compile.graph.dependence import written_arguments
from moe_compile.graph.inner_graphs import is_flex_attention
from moe_compile.graph.query import argument_of, is_integer, overload_name, tensor_of

COMPARED: Final = frozenset(
    {
        "eq", "ne", "lt", "le", "gt", "ge", "where", "masked_fill", "clamp", "maximum", "minimum",
        "abs", "log", "reciprocal", "logical_and", "logical_or", "logical_not", "and_", "or_",
        "softplus",
    }
)  # fmt: skip
Rule = Callable[[ExpertTracker, fx.Node], Dims]
FILLED: Final = frozenset({"zeros_like", "ones_like", "full_like", "empty_like"})
"""Operators that make a tensor of their own."""
KEPT: Final = CASTS | FILLED | {"detach", "bool", "int", "long"}
"""Operators that give each element in another form, or one in its place."""
ALONG: Final = {"softmax": 1, "log_softmax": 1, "cumsum": 1, "topk": 2, "sort": 1}
"""Operators whose elements depend on all of one dimension -> the place of that argument."""
SEVERAL: Final = frozenset({"topk", "sort"})
"""Those that make several tensors of the same sizes."""


def follow(tracker: ExpertTracker, node: fx.Node) -> None:
    """Find the factors of `node` from those of its inputs; those from outside begin here."""
    if maker_of(node) is not None:
        tracker.start(node)  # what it is given says its sizes, its type and its device
        return
    rule = _rule_of(node)
    if rule is None:
        expert_rules.follow(tracker, node)
        return
    if written_arguments(node) and rule is not _scattered:
        raise Lost(f"{node.name} writes in place")
    sources = tracker.operands(node)
    if rule is flex_attention or sharded_rule(node) is rule:
        sources = [one for one in sources if tensor_of(one) is not None]  # no mesh, no code
    for source in sources:
        if source not in tracker:
            tracker.start(source)
    tracker.inherit(node, sources)
    tracker.put(node, rule(tracker, node))


def _rule_of(node: fx.Node) -> Rule | None:
    if is_flex_attention(node):
        return flex_attention
    if _is_one_of_several(node):
        return _kept
    if _taken_by(node) is not None:
        return _rows_taken
    return sharded_rule(node) or RULES.get(_name(node))


def _name(node: fx.Node) -> str:
    """Return the name of an operator of PyTorch or Python; "" of another."""
    name = overload_name(node).removeprefix("aten::")
    return name if name in FUSED else operator_name(node)


def _is_one_of_several(node: fx.Node) -> bool:
    """Whether the node takes one tensor of those that an operator in `SEVERAL` makes."""
    if node.target is not operator.getitem or type(node.args[1]) is not int:
        return False
    source = node.all_input_nodes[0]
    attends = is_flex_attention(source) or _name(source) in FUSED
    return _name(source) in SEVERAL or (attends and node.args[1] == 0)


def _kept(tracker: ExpertTracker, node: fx.Node) -> Dims:
    return tracker.dims(moved(node))


def _along(tracker: ExpertTracker, node: fx.Node) -> Dims:
    """Follow an operator that keeps the dimensions but one, which `topk` makes shorter."""
    name = operator_name(node)
    dims = tracker.dims(moved(node))
    dim = argument_of(node, ALONG[name], "dim", -1 if name in SEVERAL else None)
    at = from_left(dim, len(dims))
    tracker.closed.append((node, dims[at]))
    if name == "topk":
        chosen = argument_of(node, 1, "k")
        if type(chosen) is not int:
            raise Lost(f"{node.name} chooses an unknown number")
        dims[at] = [Factor(chosen)]
    elif name == "sort":
        dims[at] = [Factor(size_of(dims[at]))]
    return dims


def _taken_by(node: fx.Node) -> fx.Node | None:
    """Return the tensor of integers by which `x[index]` takes rows of x, None for another node."""
    index = node.args[1] if node.target is operator.getitem else None
    return index if isinstance(index, fx.Node) and is_integer(index) else None


def _rows_taken(tracker: ExpertTracker, node: fx.Node) -> Dims:
    source, index = node.all_input_nodes[0], _taken_by(node)
    assert index is not None
    first, *rest = tracker.dims(source)
    tracker.closed.append((node, first))
    return [*tracker.dims(index), *rest]


def _gathered(tracker: ExpertTracker, node: fx.Node) -> Dims:
    """Follow `gather`: an element comes of its own place in all dimensions but one."""
    dim = argument_of(node, 1, "dim")
    source, index = (operand(node, i, name) for i, name in ((0, "input"), (2, "index")))
    given, dims = tracker.dims(source), tracker.dims(index)
    at = from_left(dim, len(given))
    for i, (mine, other) in enumerate(zip(dims, given, strict=True)):
        if i != at:
            unify(other, mine)
    tracker.closed.append((node, given[at]))
    return tracker.dims(index)


def _scattered(tracker: ExpertTracker, node: fx.Node) -> Dims:
    """Follow `scatter_` into a tensor of one number: an element is written at its own place.

    In all dimensions but one: along that all of them may be.
    """
    given = argument_of(node, 1, "dim")
    target, index = (operand(node, i, name) for i, name in ((0, "input"), (2, "index")))
    if not isinstance(argument_of(node, 3, "value"), bool | int | float):
        raise Lost(f"{node.name} writes what it is given")
    if operator_name(target) not in FILLED:
        raise Lost(f"{node.name} writes in place")
    dims = tracker.dims(target)
    at = from_left(given, len(dims))
    for i, (mine, other) in enumerate(zip(dims, tracker.dims(index), strict=True)):
        if i != at:
            unify(mine, other)
    tracker.closed += [(node, tracker.dims(one)[at]) for one in (target, index)]
    return tracker.dims(target)


def _embedded(tracker: ExpertTracker, node: fx.Node) -> Dims:
    ids, weight = operand(node, 0, "input"), operand(node, 1, "weight")
    rows, width = tracker.dims(weight)
    tracker.closed.append((node, rows))
    return [*tracker.dims(ids), width]


def _one_hot(tracker: ExpertTracker, node: fx.Node) -> Dims:
    return [*tracker.dims(moved(node)), [Factor(tracker.sizes_of(node)[-1])]]


RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(COMPARED, pointwise),
    **dict.fromkeys(KEPT, _kept),
    **dict.fromkeys(ALONG, _along),
    "gather": _gathered,
    "scatter_": _scattered,
    **dict.fromkeys(FUSED, attention),
    "scaled_dot_product_attention": attention,
    "embedding": _embedded,
    "one_hot": _one_hot,
}
