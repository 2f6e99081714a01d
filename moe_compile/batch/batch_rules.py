"""Follow factors through what stands around experts: routers, attention, masks, embeddings.

Contract
    Adds to `dims/expert_rules.py` operators that a whole block is written with. One that
    neither knows raises Lost. What makes an element depend on all indices of a dimension is noted
    in `Tracker.closed`.

Follow factors through attention: by one operator of torch, or by FlexAttention.
Sequences and heads are apart; positions and features are closed. The code of FlexAttention is
told the numbers of sequence, head and positions, and may read tensors: of a part of the
sequences the first has number 0 again. So it may index tensors by the number of the sequence,
which are cut as the batch is, and do nothing else with it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from typing import Any, Final

import torch.fx as fx

from moe_compile.batch.operators_run import check_numbers, is_run, run_rule, writes_own
from moe_compile.batch.sharded_rules import sharded_rule
from moe_compile.batch.taken_places import is_taken, taken
from moe_compile.dims import expert_rules
from moe_compile.dims.arguments import from_left, moved
from moe_compile.dims.factors import Dims, Factor, Lost, flat, size_of, unify
from moe_compile.dims.rules import CASTS, operator_name, pointwise
from moe_compile.dims.tracker import ExpertTracker
from moe_compile.graph.constant_tensors import maker_of
from moe_compile.graph.dependence import written_arguments
from moe_compile.graph.inner_graphs import body_named, is_flex_attention, is_higher_order
from moe_compile.graph.query import argument_of, called_name, operator_at, overload_name, tensor_of

FUSED: Final = frozenset(
    {
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_cudnn_attention",
    }
)  # fmt: skip
"""Operators that attend; what they make beside their result is for their gradients."""


def operand(call: fx.Node, position: int, name: str) -> fx.Node:
    """Return an operand of `call`; raises Lost where it is given in an unknown form."""
    found = argument_of(call, position, name)
    if not isinstance(found, fx.Node):
        raise Lost(f"{operator_at(call)} is given its operands in an unknown form")
    return found


def attention(tracker: ExpertTracker, node: fx.Node) -> Dims:
    """Follow attention: a query sees all keys of its sequence and head."""
    query, key, value = (operand(node, i, n) for i, n in enumerate(("query", "key", "value")))
    num_outer = _meet_outer(tracker, node, (query, key, value))
    is_fused = called_name(node).startswith("_")
    mask = argument_of(node, 3, "attn_bias" if is_fused else "attn_mask")
    if isinstance(mask, fx.Node):
        _meet(tracker.dims(query), tracker.dims(mask), num_outer)
    return _attended(tracker, node, (query, key, value))


def _meet_outer(tracker: ExpertTracker, node: fx.Node, operands: Sequence[fx.Node]) -> int:
    """Name alike what attention treats apart of its operands; return how many dimensions it is."""
    dims = [tracker.dims(operand) for operand in operands]
    if len({len(one) for one in dims}) > 1 or len(dims[0]) < 3:
        raise Lost(f"{operator_at(node)} attends over operands of different forms")
    num_outer = len(dims[0]) - 2
    for i in range(num_outer):
        for other in dims[1:]:
            if size_of(dims[0][i]) == size_of(other[i]):
                unify(dims[0][i], other[i])
            else:  # several query heads to a KV head
                tracker.closed += [(node, dims[0][i]), (node, other[i])]
    return num_outer


def _attended(tracker: ExpertTracker, node: fx.Node, operands: Sequence[fx.Node]) -> Dims:
    """Return the factors of the result: a query has of all keys of its sequence and head."""
    query, _, value = operands
    for one in map(tracker.dims, operands):
        tracker.closed += [(node, dim) for dim in one[-2:]]
    return [*tracker.dims(query)[:-1], [Factor(tracker.sizes_of(value)[-1])]]


def flex_attention(tracker: ExpertTracker, node: fx.Node) -> Dims:
    """Follow FlexAttention, given as the operator takes it."""
    *operands, score_code, mask, _, _, of_scores, of_mask = node.args
    if not isinstance(mask, tuple) or not all(isinstance(o, fx.Node) for o in operands):
        raise Lost(f"{operator_at(node)} is given its operands in an unknown form")
    *blocks, mask_code = mask
    tensors = [one for one in blocks if isinstance(one, fx.Node)]
    num_outer = _meet_outer(tracker, node, operands)
    for one in tensors:
        dims = tracker.dims(one)
        for mine, other in zip(tracker.dims(operands[0])[:num_outer], dims, strict=False):
            if flat(other):
                unify(mine, other)
        tracker.closed += [(node, dim) for dim in tracker.dims(one)[num_outer:]]
    for code, is_score, buffers in ((score_code, 1, of_scores), (mask_code, 0, of_mask)):
        _follow_code(tracker, node, _body(code), is_score, buffers)
    return _attended(tracker, node, operands)


def _body(code: Any) -> fx.Graph:
    body = body_named(code) if isinstance(code, fx.Node) else None
    if body is None:
        raise Lost("code of attention is in no graph")
    return body.graph


def _follow_code(
    tracker: ExpertTracker, node: fx.Node, code: fx.Graph, first: int, buffers: Sequence[fx.Node]
) -> None:
    """Follow what the code of scores, or of the mask, does with numbers and tensors.

    It is given a score where it is of scores, then the four numbers, then `buffers`.
    """
    given = code.find_nodes(op="placeholder")[first:]
    query: Any = node.args[0]
    is_known = all(isinstance(one, fx.Node) for one in (query, *buffers))
    if len(given) != 4 + len(buffers) or not is_known:
        raise Lost(f"{operator_at(node)} runs code that is given something unknown")
    sequence, head, *_ = given
    tensors = dict(zip(given[4:], buffers, strict=True))
    of_sequences, of_heads, *_ = tracker.dims(query)
    if any(maker_of(user) is None for user in head.users):
        tracker.closed.append((node, of_heads))
    cut = {t for t in tensors if t.users and all(_takes(u, sequence, (t,)) for u in t.users)}
    if any(maker_of(u) is None and not _takes(u, sequence, cut) for u in sequence.users):
        tracker.closed.append((node, of_sequences))
    for one, buffer in tensors.items():
        if one in cut:
            unify(tracker.dims(query)[0], tracker.dims(buffer)[0])
        tracker.closed += [(node, dim) for dim in tracker.dims(buffer)[one in cut :]]


def _takes(node: fx.Node, number: fx.Node, tensors: Container[Any]) -> bool:
    """Whether the node is `x[number]` or `x[number, ...]` of one of `tensors`."""
    if node.target is not operator.getitem or node.args[0] not in tensors:
        return False
    index = node.args[1]
    first, *others = index if isinstance(index, tuple) else (index,)
    return first is number and number not in others


def _meet(query: Dims, mask: Dims, num_outer: int) -> None:
    """Name alike what a mask has of the dimensions that attention treats apart."""
    first = len(query) - len(mask)
    for i in range(max(first, 0), num_outer):
        if mask[i - first]:
            unify(query[i], mask[i - first])


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
