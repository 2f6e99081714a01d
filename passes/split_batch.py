"""Run a graph on parts of its batch, so that attention of one part hides exchanges of another.

Contract
    Requires  WAITS_VISIBLE.
    Keeps     every output and every gradient of an input; a parameter's gradient is the sum over
              parts, in the order of gradient accumulation. Writes outside of the graph are sums of
              counts.
    Refused where parts are not proven to compute the same values as the whole. The result is
    checked again: each part must have the regions, and the routing, that the proof said it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch.fx as fx

from moe_compile.batch.batch_proof import find_batch_split
from moe_compile.batch.batch_split import BatchSplit
from moe_compile.dims.factors import Lost, holds
from moe_compile.dims.record import UNTRACEABLE
from moe_compile.errors import ContractViolation
from moe_compile.graph.edit import erase_dead, read_instead, store_values
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.observation import fake_mode_of
from moe_compile.graph.query import expression_of, operator_at, tensor_of, value_of
from moe_compile.journal.entries import PassReport, Verdict, judged
from moe_compile.journal.reasons import Left, Reason
from moe_compile.plan.plan import RewritePlan
from moe_compile.plan.state import CompileState
from moe_compile.regions.detect_moe import find_moe_regions
from moe_compile.regions.token_regions import TokenRows
from moe_compile.regions.token_rows import read_token_rows
from passes.contract import Fact, GraphPass
from passes.replay.batch_parts import Parts, emit_parts, part_sizes

BATCH: Final = "the batch"
"""Name of the one candidate."""
BOUND: Final = (
    "a parameter's gradient is a sum over parts, and differs by at most its number of terms times "
    "eps times the sum of the magnitudes of these terms"
)


@dataclass(frozen=True)
class SplitBatch(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "split_batch"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.WAITS_VISIBLE})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Prove, emit parts, have the outputs read these, erase the whole, check again."""
        num_parts, decided = state.num_parts, state.parts
        if decided is not None and decided.left is not None:
            is_first = state.graph_name == "dynamo"  # it is of the program, bodies included
            left = self._left(state, decided.left) if is_first else PassReport(pass_name=self.name)
            return replace(left, measures=decided.measures)
        if num_parts == 1:
            return PassReport(pass_name=self.name)
        try:
            split = find_batch_split(state.facts_of(graph), num_parts)
            if split is None:
                return PassReport(pass_name=self.name)
            _carry_out(graph, split, num_parts)
        except Left as refused:
            return self._skipped(state, refused.reason, refused.detail)
        except Lost as refused:
            return self._skipped(state, Reason.BATCH_LOST, str(refused))
        state.is_chunked = state.is_in_parts = True
        said = f"{num_parts} parts"
        state.rewrites += (RewritePlan(name=self.name, proposals=(said,)),)
        measures = decided.measures if decided is not None else {}
        applied = f"{BATCH}, in {said} (bounded: {BOUND})"
        return PassReport(pass_name=self.name, applied=(applied,), measures=measures)

    def _skipped(self, state: CompileState, reason: Reason, detail: str) -> PassReport:
        return self._left(state, Verdict(candidate=BATCH, reason=reason, detail=detail))

    def _left(self, state: CompileState, verdict: Verdict) -> PassReport:
        return PassReport(
            pass_name=self.name, skipped=(judged(state.config, "batch_parts", verdict),)
        )


def _carry_out(graph: fx.Graph, split: BatchSplit, num_parts: int) -> None:
    """Have `graph` run in parts; raise Left, and leave it as it was, where a part cannot run."""
    (output,) = graph.find_nodes(op="output")
    before = set(graph.nodes)
    numbers = split.tracker.numbers
    shares = [numbers.number_of(n) for n in part_sizes(numbers.size(split.size), num_parts)]
    try:
        parts = emit_parts(split, shares, output)
        _store_values([n for n in graph.nodes if n not in before], split, parts)
        _check_sizes(split, parts, shares)
        _check_told(split)
    except (Left, Lost):
        erase_dead([n for n in graph.nodes if n not in before])
        raise
    for node in output.all_input_nodes:
        made = parts.joined.get(node, parts.kept.get(node))
        if made is not None:
            read_instead(output, node, made)
    erase_dead(split.dead)
    _check(graph, split, parts, shares)


def _store_values(new: Sequence[fx.Node], split: BatchSplit, parts: Parts) -> None:
    fake = fake_mode_of([value_of(node) for node in split.cut])
    if fake is None:
        raise ContractViolation(
            "megamoe needs the fake tensors that torch's tracer attaches to a graph, and this "
            "graph has none"
        )
    copies = {copy: node for env in parts.envs for node, copy in env.items()}
    copies |= {new: node for made in (parts.joined, parts.kept) for node, new in made.items()}
    try:
        store_values(new, fake, copies)
    except UNTRACEABLE as error:
        raise Left(
            Reason.BATCH_LOST,
            f"the graph fails when it is traced with one part of the batch: {error}",
        ) from error


def _check_sizes(split: BatchSplit, parts: Parts, shares: Sequence[int]) -> None:
    """Raise Left where a value of a part is not as large as its share of the batch says."""
    for env, share in zip(parts.envs, shares, strict=True):
        for node, copy in env.items():
            dims = split.tracker.dims(node) if node in split.tracker else []
            tensor = tensor_of(copy)
            if tensor is None or not any(holds(dim, split.batch) for dim in dims):
                continue
            sizes = [expression_of(size) for size in tensor.shape]
            numbers = split.tracker.numbers
            if sizes != [expression_of(numbers.size(n)) for n in split.sizes(dims, share)]:
                raise Left(
                    Reason.BATCH_LOST,
                    f"run on one part of the batch, {operator_at(node)} must return that part's "
                    f"share of the whole result, and its sizes differ: {sizes}",
                )


def _check_told(split: BatchSplit) -> None:
    """Raise Left where a remaining node needs a size read off an erased one."""
    dead = {*split.dead}
    for node in split.told:
        if reader := next((user for user in node.users if user not in dead), None):
            raise Left(
                Reason.BATCH_LOST,
                f"{operator_at(reader)} reads {operator_at(node)}, a size of the whole batch, "
                "which a part does not have",
            )


def _check(graph: fx.Graph, split: BatchSplit, parts: Parts, shares: Sequence[int]) -> None:
    """Raise ContractViolation unless each part has its regions, with its tokens and routing.

    Modes may be switched between a region's rows and their sums: for nodes of other parts there.
    """
    found_in_parts, _ = find_moe_regions(GraphFacts(graph))
    regions = {region.dispatch: region for region in found_in_parts}
    for env, share in zip(parts.envs, shares, strict=True):
        for one in split.regions:
            region = regions.get(env[one.region.dispatch])
            found = None if region is None else read_token_rows(region)
            if not isinstance(found, TokenRows):
                raise ContractViolation(
                    f"cannot split the batch: {one.region.name} is found in the whole batch, but "
                    f"in one part no region is found for it: {found}"
                )
            tokens = split.tokens_of(one.share, share)
            if found.part != tokens:
                raise ContractViolation(
                    f"cannot split the batch: in one part, the rows of {one.region.name} belong "
                    f"to {found.part or 'all tokens'}, but must belong to {tokens or 'all tokens'}"
                )
            for whole, part in _pairs(one.found, found):
                wanted = None if whole is None else env.get(whole, whole)
                if part is not wanted:
                    raise ContractViolation(
                        f"cannot split the batch: in one part, {one.region.name} has node {part}, "
                        f"but must have {wanted}, the copy of {whole}"
                    )


def _pairs(whole: TokenRows, part: TokenRows) -> Iterator[tuple[fx.Node | None, fx.Node | None]]:
    """Yield pairs of nodes that identify a region, in the whole and in a part of it."""
    yield whole.tokens, part.tokens
    yield whole.chosen, part.chosen if part.is_chosen_once else None
    yield whole.sums.total, part.sums.total
    yield whole.sums.base, part.sums.base
    yield whole.sums.weights, part.sums.weights
    yield from itertools.zip_longest(whole.factors, part.factors)
