"""Prove that a graph computes the parts of its batch apart: all of it, experts included.

Contract
    Raises Left or Lost where the proof fails; the graph is not edited.
    A value has the index of the batch in one dimension, and each of its elements comes of the same
    index of the batch, or the value is of a MoE region and its routing. Of those it is known that a
    token's result comes of the token, its experts and its scores (`TokenRows`), whichever tokens
    are beside it: a part sorts, counts and exchanges its own rows.
    A write outside of the graph is refused, except a sum of counts: whole numbers, which parts add
    up as the whole does. Its results may be computed from counts, sums and means over the batch,
    whose terms parts add up.

Pseudo-code
    follow factors from all inputs; a region's sums have the factors of its tokens
    batch = the outermost factor of a dimension of an input, the first for which all holds:
        each node that depends on the batch has it, in one dimension, or is of a region
        nothing mixes its indices
        each result of the graph has it, or is made of counts alone

A batch whose size is a symbol has guards in compiled code.
Each part of such a batch has two indices or more, by a guard: for a size that may be one the
tracer asks whether it is, and keeps the answer, so that code would be for one size
of the batch after all. A batch that is smaller is compiled for its size alone.
A size that the program marks as dynamic becomes no constant, and one that it bounds gets no
guard: torch makes errors of these. Raises Left instead.
All of this follows from the size that this rank has. A graph that runs in parts has the same
plan for any size, and one that is refused has another plan: ranks compare them.

Integers that the host reads from counts add up over parts as the counts do.
Each part's experts need its own integers on the host, so that those of the whole, which a model
keeps or returns, are their sums: the host reads nothing for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint, statically_known_true

from moe_compile.batch.batch_body import Dependents, body_of
from moe_compile.batch.batch_split import BatchSplit, SplitRegion
from moe_compile.batch.batch_terms import loss_arguments, terms_of
from moe_compile.batch.batch_tracking import candidates, follow_graph, inside
from moe_compile.batch.sharded_rules import is_about_ranks, keeps_indices
from moe_compile.batch.sorted_factors import check_factors
from moe_compile.batch.token_shares import check_share, find_share
from moe_compile.capacity.detect_capacity import find_capacity_regions
from moe_compile.dims.arguments import operator_name
from moe_compile.dims.factors import Factor, Lost, flat, holds
from moe_compile.dims.tracker import Tracker, is_even_exchange
from moe_compile.graph.dependence import Dependence, storages
from moe_compile.graph.effects import always_holds, draws_random, is_host_arithmetic, is_pure
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.query import (
    called_name,
    expression_of,
    has_gradient,
    is_assertion,
    is_launch,
    operator_at,
    tensor_of,
)
from moe_compile.graph.torch_calls import maker_of
from moe_compile.journal.reasons import Left, Reason
from moe_compile.proof.row_proof import prove_rows_independent
from moe_compile.regions.body_nodes import is_host_read
from moe_compile.regions.detect_moe import find_moe_regions
from moe_compile.regions.implied_assertions import is_implied
from moe_compile.regions.regions import RowProof
from moe_compile.regions.replayable import memory_of
from moe_compile.regions.token_counts import counts_values
from moe_compile.regions.token_index import TOPK, TokenIndex, index_in_columns
from moe_compile.regions.token_rows import find_token_rows

ADDS_TO: Final = frozenset({"add_", "__iadd__", "iadd"})
Proven = list[tuple[SplitRegion, RowProof]]


def find_batch_split(facts: GraphFacts, num_parts: int) -> BatchSplit | None:
    """Return the split of a graph into parts of its batch; None where it has no MoE region.

    Raises Left or Lost where parts are not proven to compute the same as the whole.
    """
    regions = _regions(facts)
    if not regions:
        with_capacity = find_capacity_regions(facts, (), 0)
        if with_capacity.exchanges:
            raise Left(Reason.BATCH_CAPACITY, ", ".join(sorted(with_capacity.exchanges)))
        return None
    split = split_around(facts, regions, num_parts)
    is_settled = settle_size(split.tracker.numbers.size(split.size), num_parts)
    return split if is_settled else find_batch_split(facts, num_parts)  # its size is a number now


def split_around(facts: GraphFacts, regions: Proven, num_parts: int) -> BatchSplit:
    """Return the split of a graph into parts of its batch, given its regions with their proofs.

    Raises Left or Lost where parts are not proven to compute the same as the whole.
    """
    graph = facts.graph
    tracker, lost = follow_graph(facts, [split for split, _ in regions])
    if unknown := next((n for n in graph.find_nodes(op="placeholder") if n in lost), None):
        raise Lost(lost[unknown])
    why: Left | Lost | None = None
    of_tokens = _outer_of_tokens(regions, tracker)
    for batch in candidates(graph, tracker):
        try:
            if batch.size < num_parts:
                raise Left(Reason.BATCH_TOO_SMALL, f"{batch.size} for {num_parts} parts")
            return _Proof(facts, regions, tracker, lost, batch).split()
        except (Left, Lost) as refused:
            why = refused if why is None or batch in of_tokens else why
    if _is_one_sequence(graph, tracker, of_tokens):
        why = Left(Reason.BATCH_TOO_SMALL, f"1 for {num_parts} parts")
    raise why or Left(Reason.NO_BATCH)


def _outer_of_tokens(regions: Proven, tracker: Tracker) -> list[Factor]:
    """Return the outermost factors of the regions' tokens: the user's batch is one of these."""
    tokens = (split.found.tokens for split, _ in regions)
    return [f for node in tokens if node in tracker for f in flat(tracker.dims(node)[0])[:1]]


def _is_one_sequence(graph: fx.Graph, tracker: Tracker, of_tokens: list[Factor]) -> bool:
    """Whether tokens are positions of one sequence: an input has them inside a batch of one."""
    inputs = (node for node in graph.find_nodes(op="placeholder") if node in tracker)
    tensors = (n for n in inputs if not isinstance(tensor_of(n), torch.nn.Parameter))
    dims = ([flat(dim) for dim in tracker.dims(node)[:2]] for node in tensors)
    return any(len(d) > 1 and not d[0] and d[1][:1] and d[1][0] in of_tokens for d in dims)


def _regions(facts: GraphFacts) -> Proven:
    regions, others = find_moe_regions(facts)
    if unproven := next((other for other in others if other.is_region), None):
        raise Left(unproven.reason, unproven.detail)
    found = []
    for region in regions:
        proof, rows = prove_rows_independent(region), find_token_rows(region)
        if isinstance(proof, Left):
            raise proof
        if proof.whole:  # right for all rows of an expert; a part has some only
            raise Left(Reason.ROWS_MIXED, operator_at(proof.whole[0][0]))
        if isinstance(rows, Left):
            raise rows
        if rows.chosen is None or not rows.is_chosen_once:
            known = TokenIndex(facts.dependence.written)
            cause = region.counts if rows.chosen is not None else known.not_chosen(rows.index)
            raise Left(Reason.CHOSEN_TWICE, operator_at(cause))
        share = find_share(region, rows)
        found.append((SplitRegion(region=region, found=rows, share=share), proof))
    return found


@dataclass(frozen=True, slots=True)
class _Proof:
    """The proof for one factor."""

    facts: GraphFacts
    regions: Proven
    tracker: Tracker
    lost: dict[fx.Node, str]
    batch: Factor

    @property
    def graph(self) -> fx.Graph:
        """The graph."""
        return self.facts.graph

    @property
    def dependence(self) -> Dependence:
        """The dependences of the graph."""
        return self.facts.dependence

    def split(self) -> BatchSplit:
        """Return the split by this factor; raise where it is not proven."""
        mixing = {node for node, dim in self.tracker.closed if holds(dim, self.batch)}
        found = self._dependents(mixing)
        self._check_inputs(found)
        self._note_counters(found)
        found.end(self.facts, self._sums(found))
        self._check_routed(found)
        for split, _ in self.regions:
            if (
                split.found.tokens not in found.per_sequence
                and split.found.tokens not in found.inputs
            ):
                raise Left(Reason.NO_BATCH, operator_at(split.found.tokens))
            check_factors(split, self.tracker)
            if split.share is not None:
                given = {n for n in found.inputs if n.op == "placeholder"}
                check_share(split, split.share, self.tracker, given)
        splits = tuple(split for split, _ in self.regions)
        return body_of(self.facts, splits, self.tracker, self.batch, found)

    def _dependents(self, mixing: Collection[fx.Node]) -> Dependents:
        found = Dependents()
        sums = {split.found.sums.total for split, _ in self.regions}
        for node in self.graph.nodes:
            is_call = node.op in ("call_function", "call_method")
            sources = [n for n in self.dependence.needs(node) if n in found] if is_call else []
            if self.tracker.numbers.tells_sizes(node):
                needs = self.dependence.needs(node)
                found.sizes_only |= {node} & {
                    node for n in needs if n in found or n in found.sizes_only
                }
            elif not sources:
                if self._has_batch(node):
                    found.inputs[node] = None
            elif is_about_ranks(node) and not any(n in found.mixed for n in sources):
                found.per_sequence.add(node)
            elif node in self.lost or node in mixing or not self._has_batch(node):
                found.mixed.add(node)
            elif node not in sums and (routed := [n for n in sources if n in found.mixed]):
                raise self._refusal(routed[0], found)
            else:
                found.per_sequence.add(node)
        return found

    def _note_counters(self, found: Dependents) -> None:
        """Note counters: each part counts, or one sum of all counts where the graph returns it."""
        counters = {node for node in found.mixed if self._is_counter(node, found.per_sequence)}
        found.counters = {node for node in counters if not node.users}
        found.returned = counters - found.counters

    def _sums(self, found: Dependents) -> set[fx.Node]:
        """Return the nodes that add up over parts: counts, sums and means of values with the batch.

        So do integers that the host reads from these.
        """
        regions = (split.region for split, _ in self.regions)
        sums = {n for region in regions for n in (region.counts, region.received_counts)}
        over = [node for node, dim in self.tracker.closed if holds(dim, self.batch)]
        for node in over:
            is_sum = node not in self.lost and terms_of(node) is not None
            if is_sum and over.count(node) == 1 and self._is_total(node):
                sums |= {node} if self._come_apart(node, found) else set()
        return sums | reads_that_add_up(found.mixed, sums)

    def _is_total(self, node: fx.Node) -> bool:
        """Whether a sum, a mean or a loss is over the batch, of terms that come apart."""
        loss = loss_arguments(node)
        if loss is None:
            return not self._has_batch(node)
        terms = self.tracker.terms.get(node, [])
        if loss["reduction"] == "batchmean":
            terms = self.tracker.dims(loss["input"])[:1]
        return any(holds(dim, self.batch) for dim in terms)

    def _come_apart(self, node: fx.Node, found: Dependents) -> bool:
        """Whether each input of the node has the batch in a dimension, or does not depend on it."""
        apart = found.per_sequence | {*found.inputs}
        return not any(n in found and n not in apart for n in node.all_input_nodes)

    def _check_inputs(self, found: Dependents) -> None:
        """Refuse an input, except parameters, whose gradient would be a sum over parts."""
        read = self.dependence.above(found.nodes)
        for node in self.graph.find_nodes(op="placeholder"):
            is_parameter = isinstance(tensor_of(node), torch.nn.Parameter)
            if (
                node in read
                and has_gradient(node)
                and node not in found.inputs
                and not is_parameter
            ):
                raise Left(Reason.BATCH_MIXED, operator_at(node))

    def _has_batch(self, node: fx.Node) -> bool:
        """Whether one dimension of `node` has the index of the batch; raises in any other form."""
        if node not in self.tracker:
            return False
        if self.batch in self.tracker.picks(node):
            raise Left(Reason.BATCH_MIXED, operator_at(node))
        places = [dim for dim in self.tracker.dims(node) if holds(dim, self.batch)]
        if not places:
            return False
        if len(places) > 1 or flat(places[0]).count(self.batch) != 1:
            raise Lost(
                f"{operator_at(node)} has the batch in several dimensions, but must have it in one"
            )
        return True

    def _check_routed(self, found: Dependents) -> None:
        """Refuse nodes that mix the batch, except regions, their routing and uses of counts."""
        known = self.dependence.above(found.counters) & found.mixed
        for split, _ in self.regions:
            region, rows = split.region, split.found
            ends = (region.counts, rows.index, rows.sums.index, *rows.factors)
            in_columns = filter(None, map(index_in_columns, (rows.gather, rows.sums.total)))
            chosen = [n for n in (rows.chosen,) if n is not None]
            stops = {
                *chosen,
                *(n for one in chosen for n in one.all_input_nodes),
                *found.per_sequence,
            }
            known |= inside(split)
            known |= self.dependence.above((*ends, *in_columns), stops=stops) & found.mixed
        kept = self.dependence.in_order(found.outputs_once)
        if bad := next((n for n in kept if not self._is_done_once(n, found)), None):
            raise self._refusal(next((n for n in kept if n in found.mixed - known), bad), found)
        known |= found.outputs_once | found.reductions
        for node in self.dependence.in_order(found.mixed - known):
            is_idle = node not in found.needed and is_pure(node)
            if not is_idle and not self._is_host_side(node):
                raise self._refusal(node, found)
        for node in self.dependence.in_order(filter(is_launch, found.nodes - known)):
            keeps = is_even_exchange(node) and self._travels_whole(node)
            if not (keeps or (node in found.per_sequence and keeps_indices(node))):
                raise Left(Reason.COMMUNICATES, operator_at(node))

    def _is_done_once(self, node: fx.Node, found: Dependents) -> bool:
        """Whether `node`, whose value leaves the graph, may be computed of sums over all parts."""
        is_writer = node in self.dependence.writes
        writes = is_writer and node not in found.returned and not self._writes_own(node)
        if node in found.per_sequence or writes or draws_random(node):
            return False
        return not (has_gradient(node) and any(n in found.inputs for n in node.all_input_nodes))

    def _writes_own(self, node: fx.Node) -> bool:
        """Whether `node` writes memory that its region makes, such as a kernel's indices of rows: a
        new form of the region makes and writes it anew."""
        written = self.dependence.writes[node]
        regions = (split.region for split, _ in self.regions)
        return any(node in r.body and written and written <= memory_of(r) for r in regions)

    def _travels_whole(self, exchange: fx.Node) -> bool:
        """Whether the exchange sends entries of every index of the batch to each rank."""
        return not holds(self.tracker.sent.get(exchange, [self.batch]), self.batch)

    def _refusal(self, node: fx.Node, found: Dependents) -> Left | Lost:
        """Return the refusal of `node`: because of itself, or of the first lost node before it."""
        if draws_random(node):
            return Left(Reason.BATCH_RANDOM, operator_at(node))
        if maker_of(node) is not None:
            return Lost(
                f"{operator_at(node)} reads the type of a tensor with the batch dimension, "
                "but not its values"
            )
        chosen = [split.found.chosen for split, _ in self.regions]
        routing = self.dependence.below([n for n in chosen if n is not None]) - {node}
        before = self.dependence.above([node]) & found.mixed - routing
        for one in self.dependence.in_order(before):
            why = self.lost.get(one)
            if why and any(
                n in found.per_sequence or n in found.inputs for n in one.all_input_nodes
            ):
                return Lost(why)
        return Left(Reason.BATCH_MIXED, operator_at(node))

    def _is_host_side(self, node: fx.Node) -> bool:
        """Whether the node only leads to assertions that hold by themselves for each part."""
        below = self.dependence.below([node])
        ends = [n for n in below if not n.users]
        return all(is_host_arithmetic(n) for n in below) and all(map(self._may_be_left_out, ends))

    def _may_be_left_out(self, node: fx.Node) -> bool:
        """Whether the node may be left out: if it is pure, or an assertion that holds anyway."""
        if not is_assertion(node):
            return is_pure(node)
        if always_holds(node):
            return True
        facts = ((split.region, proof.facts) for split, proof in self.regions)
        return any(known and is_implied(node, region, known) for region, known in facts)

    def _is_counter(self, node: fx.Node, apart: Collection[fx.Node]) -> bool:
        """Whether the node adds counts of values that come apart to an outside tensor of counts.

        A layer that runs twice counts there twice. The graph may return that tensor, as it does for
        `self.seen += counts`.
        """
        if called_name(node) not in ADDS_TO or not isinstance(node.args[0], fx.Node):
            return False
        mine, inside = storages(node.args[0]), [n for n in self.graph.nodes if n.op != "output"]
        touching = [n for n in inside if self.dependence.reads(n) & mine]
        others = (w for n, w in self.dependence.writes.items() if n not in touching)
        known = TokenIndex(frozenset().union(*others))
        chosen = [n for n in apart if known.output(n, 1, "topk", *TOPK) is not None]
        return all(self._counts(n, touching, known, chosen) for n in touching)

    def _counts(
        self,
        node: fx.Node,
        touching: Collection[fx.Node],
        known: TokenIndex,
        chosen: Collection[fx.Node],
    ) -> bool:
        """Whether the node adds counts of `chosen` to a tensor from outside, and only such
        additions read the sum."""
        if called_name(node) not in ADDS_TO or len(node.args) != 2 or node.kwargs:
            return False
        buffer, value = node.args
        if not isinstance(buffer, fx.Node) or not isinstance(value, fx.Node) or value in touching:
            return False
        is_outside = buffer.op == "placeholder" or buffer in touching
        is_read = any(user.op != "output" and user not in touching for user in node.users)
        counts = any(counts_values(known, value, one, self.dependence) for one in chosen)
        return is_outside and not is_read and counts


def settle_size(size: Any, num_parts: int) -> bool:
    """Return whether `size` is unchanged: False where it is a constant from now on.

    Raises Left where there are not enough indices for parts of it.
    """
    least = 2 * num_parts
    if not isinstance(size, torch.SymInt) or statically_known_true(size >= least):
        return True
    marks = list(_marks_of(size))
    if any(isinstance(mark, StrictMinMaxConstraint) for mark in marks):
        raise Left(
            Reason.BATCH_TOO_SMALL,
            f"the batch size may be less than {least}, but {num_parts} parts need at least {least}",
        )
    if size >= least:
        return True
    if marks:
        raise Left(
            Reason.BATCH_TOO_SMALL,
            (
                f"the batch size is marked as dynamic, and {num_parts} parts need at least "
                f"{least} in the call that is compiled"
            ),
        )
    int(size)  # a guard: the tracer puts the number in the place of the symbol
    return False


def _marks_of(size: torch.SymInt) -> Iterator[Any]:
    """Yield the program's constraints on the dimensions of inputs that have this size."""
    tracked = getattr(size.node.shape_env, "tracked_fakes", None) or ()
    for one in tracked:
        if not isinstance(one.fake, torch.Tensor):
            continue
        said = getattr(one.symbolic_context, "constraint_sizes", None) or ()
        for own, mark in zip(one.fake.shape, said, strict=False):
            symbols = getattr(expression_of(own), "free_symbols", frozenset[Any]())
            is_its = bool(symbols & expression_of(size).free_symbols)
            if is_its and mark is not None and not mark.warn_only:
                yield mark


ADDS_UP: Final = frozenset(
    {
        "contiguous", "cpu", "detach", "flatten", "getitem", "item", "reshape", "select", "squeeze",
        "sum", "to", "unsqueeze", "view",
    }
)  # fmt: skip
"""Operators that may be applied to the terms of a sum instead of the sum."""
WIDE: Final = (torch.int32, torch.int64)


def reads_that_add_up(nodes: Iterable[fx.Node], sums: Collection[fx.Node]) -> set[fx.Node]:
    """Return the host reads among `nodes` of integers that add up, from one of `sums`."""
    return {node for node in nodes if is_host_read(node) and _adds_up(node, sums)}


def _adds_up(node: fx.Node, sums: Collection[fx.Node]) -> bool:
    while node not in sums:
        tensor, sources = tensor_of(node), node.all_input_nodes
        is_wide = tensor is None or tensor.dtype in WIDE
        if not is_wide or operator_name(node) not in ADDS_UP or len(sources) != 1:
            return False
        (node,) = sources
    return True
