"""Follow factors through a whole block, with nodes that `Tracker.follow` does not know.

Contract
    Adds FlexAttention, tensors that ranks share, indices that are tensors, and losses. Dimensions
    all of whose indices an element depends on are noted in `Tracker.closed`. A write in place is
    followed where the graph made the memory.

In FlexAttention sequences and heads are apart; positions and features are closed. Its code is
given the numbers of sequence, head and positions, and may read tensors. In a part of the batch
the first sequence has number 0 again. So the code may use the number of the sequence only to
index tensors, which are cut as the batch is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from typing import Any, Final

import torch.fx as fx

from moe_compile.batch.batch_terms import loss_arguments
from moe_compile.batch.sharded_rules import sharded_rule
from moe_compile.batch.taken_places import is_taken, taken
from moe_compile.dims.factors import Dims, Factor, Lost, flat, unify
from moe_compile.dims.flow import Flow
from moe_compile.dims.operators import meet_outer
from moe_compile.dims.tracker import Tracker
from moe_compile.graph.dependence import storages, written_arguments
from moe_compile.graph.inner_graphs import body_named, is_flex_attention, is_higher_order
from moe_compile.graph.query import operator_at, tensor_of, value_of
from moe_compile.graph.torch_calls import maker_of

OUTSIDE: Final = ("placeholder", "get_attr")


def flex_attention(tracker: Tracker, node: fx.Node) -> Dims:
    """Follow FlexAttention, given as the operator takes it."""
    *operands, score_code, mask, _, _, of_scores, of_mask = node.args
    if not isinstance(mask, tuple) or not all(isinstance(o, fx.Node) for o in operands):
        raise Lost(f"{operator_at(node)} takes its operands in a form that megamoe does not know")
    *blocks, mask_code = mask
    tensors = [one for one in blocks if isinstance(one, fx.Node)]
    flow = Flow(node, tracker.numbers, tracker)
    num_outer = meet_outer(flow, [tracker.dims(operand) for operand in operands])
    for one in tensors:
        dims = tracker.dims(one)
        for mine, other in zip(tracker.dims(operands[0])[:num_outer], dims, strict=False):
            if flat(other):
                unify(mine, other)
        tracker.closed += [(node, dim) for dim in tracker.dims(one)[num_outer:]]
    for code, is_score, buffers in ((score_code, 1, of_scores), (mask_code, 0, of_mask)):
        _follow_code(tracker, node, _body(code), is_score, buffers)
    query, _, value = operands
    flow.close([dim for one in operands for dim in tracker.dims(one)[-2:]])
    dims = [*tracker.dims(query)[:-1], [Factor(tracker.sizes_of(value)[-1])]]
    tracker.put_several(node, [dims, *[None] * (len(value_of(node)) - 1)])
    return dims


def _body(code: Any) -> fx.Graph:
    body = body_named(code) if isinstance(code, fx.Node) else None
    if body is None:
        raise Lost("the graph does not have the code of attention (a score or mask function)")
    return body.graph


def _follow_code(
    tracker: Tracker, node: fx.Node, code: fx.Graph, first: int, buffers: Sequence[fx.Node]
) -> None:
    """Follow numbers and tensors through the code of scores, or of the mask.

    Its inputs are a score, in code of scores, then the four numbers, then `buffers`.
    """
    given = code.find_nodes(op="placeholder")[first:]
    query: Any = node.args[0]
    is_known = all(isinstance(one, fx.Node) for one in (query, *buffers))
    if len(given) != 4 + len(buffers) or not is_known:
        raise Lost(f"{operator_at(node)} runs a function whose inputs megamoe does not know")
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


def follow(tracker: Tracker, node: fx.Node) -> None:
    """Find the factors of `node` from those of its inputs; those from outside begin here."""
    if maker_of(node) is not None:
        tracker.start(node)  # its inputs give its sizes, type and device
        return
    is_written = bool(written_arguments(node))
    if is_written and not writes_own(node):
        raise Lost(f"{operator_at(node)} writes in place")
    sources = tracker.operands(node)
    if (sharded := sharded_rule(node)) is not None or is_flex_attention(node):
        sources = [one for one in sources if tensor_of(one) is not None]  # no mesh, no code
        _by(sharded or flex_attention, tracker, node, sources)
    elif is_taken(node):
        _by(taken, tracker, node, sources)
    elif is_higher_order(node):
        raise Lost(f"{operator_at(node)} calls a function, and the batch is not traced through it")
    elif (loss := loss_arguments(node)) is not None and loss["reduction"] != "none":
        _follow_loss(tracker, node, loss)
    else:
        tracker.follow(node, may_write=is_written)


Rule = Callable[[Tracker, fx.Node], Dims]


def _by(rule: Rule, tracker: Tracker, node: fx.Node, sources: Sequence[fx.Node]) -> None:
    if any(tensor_of(one) is None for one in sources):
        raise Lost(f"{operator_at(node)}: a size is not known at compile time")
    tracker.begin(node, sources)
    tracker.put(node, rule(tracker, node))


def _follow_loss(tracker: Tracker, node: fx.Node, loss: dict[str, Any]) -> None:
    """Note the terms that a loss adds up, or averages."""
    apart, sources = {**loss, "reduction": "none"}, tracker.operands(node)
    tracker.begin(node, sources)
    made, flow = tracker.made_by(node, sources, apart)
    tracker.terms[node] = flow.dims(made)
    flow.close(tracker.terms[node])
    tracker.put(node, [])


def writes_own(node: fx.Node) -> bool:
    """Whether the memory that `node` writes in place was made by the graph."""
    given = {s for n in node.graph.nodes if n.op in OUTSIDE for s in storages(n)}
    written = [storages(one) for one in written_arguments(node)]
    return all(memory and not memory & given for memory in written)
