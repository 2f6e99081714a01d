"""The factors of a whole graph, experts included, and the candidates for the batch.

Contract
    The sums of a MoE region have the factors of its tokens; nodes between them, from the gather
    to the sums, are not followed. The result of an unknown operator has factors of its own, and the
    reason is noted.
    `follow` adds to `Tracker.follow` FlexAttention, tensors that ranks share, indices that are
    tensors, and losses. Dimensions all of whose indices an element depends on are noted in
    `Tracker.closed`. A write in place is followed where the graph made the memory.

In FlexAttention sequences and heads are apart; positions and features are closed. Its code is
given the numbers of sequence, head and positions, and may read tensors. In a part of the batch
the first sequence has number 0 again. So the code may use the number of the sequence only to
index tensors, which are cut as the batch is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from typing import Any, Final

import torch
import torch.fx as fx

from moe_compile.batch.batch_split import SplitRegion
from moe_compile.batch.batch_terms import loss_arguments
from moe_compile.batch.sharded_rules import sharded_rule
from moe_compile.batch.taken_places import is_taken, taken
from moe_compile.batch.token_shares import dims_of_slice
from moe_compile.dims.factors import Dims, Factor, Lost, SizeNumbers, flat, size_of, unify
from moe_compile.dims.flow import Flow
from moe_compile.dims.operators import meet_outer
from moe_compile.dims.tracker import Tracker
from moe_compile.graph.dependence import storages, written_arguments
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.inner_graphs import body_named, is_flex_attention, is_higher_order
from moe_compile.graph.query import operator_at, tensor_of, value_of
from moe_compile.graph.torch_calls import maker_of
from moe_compile.regions.row_chain import num_rows
from moe_compile.regions.token_sums import base_of

OUTSIDE: Final = ("placeholder", "get_attr")


def follow_graph(
    facts: GraphFacts, regions: Collection[SplitRegion]
) -> tuple[Tracker, dict[fx.Node, str]]:
    """Return the factors of all nodes that can be followed, and why others cannot."""
    came_back = {num_rows(s.region.result): num_rows(s.region.rows) for s in regions}
    numbers = SizeNumbers(facts.graph, came_back)
    tracker, lost = Tracker(facts.modes, numbers), dict[fx.Node, str]()
    sums = {split.found.sums.total: split for split in regions}
    inner = {n for split in regions for n in inside(split)} - sums.keys()
    slices = {n: split for split in regions if split.share is not None for n in split.share.slices}
    for node in facts.graph.nodes:
        if node.op == "placeholder" and tensor_of(node) is not None:
            _start(tracker, node, lost)
        if node.op not in ("call_function", "call_method"):
            continue
        try:
            if node in sums:
                tracker.put(node, _summed(tracker, sums[node]))
            elif node in inner:
                lost[node] = ""
            elif node in slices and (dims := dims_of_slice(tracker, node, slices[node])):
                tracker.put(node, dims)
            else:
                follow(tracker, node)
        except Lost as refused:
            lost[node] = str(refused)
            _start(tracker, node, lost)
    return tracker, lost


def _summed(tracker: Tracker, split: SplitRegion) -> Dims:
    """Return the factors of a region's sums: their rows are the tokens'.

    So are the rows of their base, of the weights, and of the experts that are chosen.
    """
    found = split.found
    tokens, columns = tracker.dims(found.tokens)
    for node in (found.sums.weights, base_of(found.sums.total)):
        if node is not None:
            unify(tokens, tracker.dims(node)[0], prefix=True)
    if found.chosen is not None and split.share is None:
        chosen = [factor for dim in tracker.dims(found.chosen) for factor in dim]
        unify([*tokens, Factor(size_of(chosen) // size_of(tokens))], chosen)
    return [flat(tokens), [Factor(size_of(columns))]]


def _start(tracker: Tracker, node: fx.Node, lost: dict[fx.Node, str]) -> None:
    """Begin anew at `node`; a node whose sizes are not known is noted as lost."""
    try:
        tracker.start(node)
    except Lost as refused:
        lost.setdefault(node, f"{operator_at(node)}: {refused}")


def inside(split: SplitRegion) -> set[fx.Node]:
    """Return the nodes that send counts, and bring rows to their experts and back to the sums."""
    region, found, dependence = split.region, split.found, split.region.facts.dependence
    sent = dependence.below([region.counts]) & dependence.above([region.count_exchange])
    return {
        *sent,
        found.gather,
        *found.before,
        *region.body,
        *region.between,
        *found.after,
        *found.sums.tail,
        *(dependence.below([region.count_exchange]) & dependence.above([region.result])),
    }


def candidates(graph: fx.Graph, tracker: Tracker) -> Iterator[Factor]:
    """Yield the outermost factor of each dimension of inputs that are no parameters, in order."""
    seen: list[Factor] = []
    for node in graph.find_nodes(op="placeholder"):
        if node not in tracker or isinstance(tensor_of(node), torch.nn.Parameter):
            continue
        for dim in tracker.dims(node):
            for outer in flat(dim)[:1]:
                if outer not in seen:
                    seen.append(outer)
                    yield outer


def flex_attention(tracker: Tracker, node: fx.Node) -> Dims:
    """Follow FlexAttention, given as the operator takes it."""
    *operands, score_code, mask, _, _, of_scores, of_mask = node.args
    if not isinstance(mask, tuple) or not all(isinstance(o, fx.Node) for o in operands):
        raise Lost(
            f"{operator_at(node)} must be called with tensors as operands and a tuple as "
            "block mask, and is not"
        )
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
        raise Lost(
            "the graph must contain the score and mask functions of FlexAttention, and one "
            "is missing"
        )
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
        raise Lost(
            f"{operator_at(node)} runs a function, and megamoe cannot tell which tensors are "
            "its inputs"
        )
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
        raise Lost(
            f"{operator_at(node)} calls a function, through which megamoe does not follow "
            "the batch dimension"
        )
    elif (loss := loss_arguments(node)) is not None and loss["reduction"] != "none":
        _follow_loss(tracker, node, loss)
    else:
        tracker.follow(node, may_write=is_written)


Rule = Callable[[Tracker, fx.Node], Dims]


def _by(rule: Rule, tracker: Tracker, node: fx.Node, sources: Sequence[fx.Node]) -> None:
    if any(tensor_of(one) is None for one in sources):
        raise Lost(
            f"{operator_at(node)} must have sizes that are known at compile time, and one is not"
        )
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
