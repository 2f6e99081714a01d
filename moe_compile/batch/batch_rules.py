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

from moe_compile.attention.head_factors import Dims, Factor, Lost, size_of
from moe_compile.attention.head_rules import CASTS, operator_name, pointwise
from moe_compile.attention.move_arguments import from_left, moved
from moe_compile.batch.attention_rules import FUSED, attention, flex_attention, operand
from moe_compile.batch.operators_run import check_numbers, is_run, run_rule, writes_own
from moe_compile.batch.sharded_rules import sharded_rule
from moe_compile.batch.taken_places import is_taken, taken
from moe_compile.capacity import expert_rules
from moe_compile.capacity.expert_tracking import ExpertTracker
from moe_compile.graph.constant_tensors import maker_of
from moe_compile.graph.dependence import written_arguments
from moe_compile.graph.inner_graphs import is_flex_attention, is_higher_order
from moe_compile.graph.query import argument_of, operator_at, overload_name, tensor_of

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
    if written_arguments(node) and not (rule in (run_rule, taken) and writes_own(node)):
        raise Lost(f"{operator_at(node)} writes in place")
    sources = tracker.operands(node)
    if rule in (run_rule, taken):
        check_numbers(node, sources)
    if rule in (flex_attention, _calling) or sharded_rule(node) is rule:
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
    if is_taken(node):
        return taken
    named = sharded_rule(node) or RULES.get(_name(node))
    if named is None and is_higher_order(node):
        return _calling
    return named or (run_rule if is_run(node) else None)


def _calling(_: ExpertTracker, node: fx.Node) -> Dims:
    raise Lost(f"{operator_at(node)} calls a function, which is not followed")


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
    return _name(source) in SEVERAL or is_run(source) or (attends and node.args[1] == 0)


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
            raise Lost(f"{operator_at(node)} chooses an unknown number")
        dims[at] = [Factor(chosen)]
    elif name == "sort":
        dims[at] = [Factor(size_of(dims[at]))]
    return dims


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
    **dict.fromkeys(FUSED, attention),
    "scaled_dot_product_attention": attention,
    "embedding": _embedded,
    "one_hot": _one_hot,
}
