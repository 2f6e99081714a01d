"""Multiply rows by their scores before the last product of the experts, not after the combine.

Contract
    Requires  WAITS_VISIBLE.
    Keeps     every collective, with one more for each region rewritten; the rows that travel but
              for their scores; sums per token.
    Loses     by BOUND, where the option `apply_scores` asks for that.

    y = down(h) -> combine -> y * scores     becomes     down(h * scores there) -> combine -> y * 1

The scores are exchanged beside the rows, split alike, in the type in which the model multiplies,
and put in the order of h as the experts put the rows. So the backward pass needs no row that came
back: the gradient of a score is the product of h and its gradient, where h is. Autograd derives
that, with the exchange back to the rank of the token.

The guess which nodes put rows in order is checked by the row proof, on a copy of the graph that is
rewritten: it refuses a product of h and scores in another order, and rows that do not come back in
the order sent. Regions are found after this pass, in the graph as it leaves it: chunks, formats of
rows and prices know the exchange of scores as one of a model that has it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch
import torch.fx as fx

from moe_compile.dims.record import UNTRACEABLE
from moe_compile.errors import ContractViolation
from moe_compile.graph.edit import Emitter, erase_unused, read_instead, store_values, substitute
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.observation import fake_mode_of
from moe_compile.graph.query import C10D, input_splits, operator_at, output_splits, value_of
from moe_compile.graph.snapshot import copy_of_graph
from moe_compile.journal.entries import Verdict, judged
from moe_compile.journal.reasons import Left, Reason
from moe_compile.plan.state import CompileState
from moe_compile.proof.row_proof import prove_rows_independent
from moe_compile.regions.detect_moe import find_moe_regions
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.row_chain import shape_of, type_of
from moe_compile.regions.scored_rows import ScoredRows, find_scored_rows
from passes.contract import Fact
from passes.replay.scores_of_rows import ScoresOfRows
from passes.rewrite import Proposed, Rewrite

OPTION: Final = "apply_scores"
BOUND: Final = (
    "each number differs by at most (3 eps + 2 n eps') times the sum of the magnitudes of the n "
    "products that add up to it; this holds for weighted rows and for the gradients of scores, "
    "activations and the last weight; eps is that of the rows' dtype, eps' that of float32, or of "
    "float64 if the rows are float64; gradients that are computed from these carry the differences "
    "on"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BeforeDown:
    """The scores of one region."""

    region: str
    """Its name."""
    dispatch: str
    """Name of the launch of its dispatch."""
    num_products: int
    """Number of products that read rows times their scores."""
    score_type: str
    """Type in which scores travel."""

    def __str__(self) -> str:
        """Return its name in reports."""
        products = "1 product" if self.num_products == 1 else f"{self.num_products} products"
        return f"the scores of {self.region}, before {products}, exchanged as {self.score_type}"


@dataclass(frozen=True)
class ApplyScores(Rewrite[BeforeDown]):
    """See the module docstring."""

    name: ClassVar[str] = "apply_scores"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.WAITS_VISIBLE})
    after: ClassVar[frozenset[str]] = frozenset({"split_batch"})
    numerics: ClassVar[str] = "bounded"
    bound: ClassVar[str] = BOUND
    is_decided: ClassVar[bool] = True
    by_region: ClassVar[bool] = True

    def propose(self, graph: fx.Graph, state: CompileState) -> Proposed[BeforeDown]:
        """Return the regions whose scores may multiply earlier, each tried on a copy."""
        if not state.config.asks_for(OPTION):
            return Proposed()
        regions, others = find_moe_regions(state.facts_of(graph))
        skipped = [other for other in others if other.is_region]
        proposals = []
        for region in regions:
            found = _tried(graph, region, may_round=state.config.allows(self.numerics))
            if isinstance(found, Left):
                left = Verdict(candidate=region.name, reason=found.reason, detail=found.detail)
                skipped.append(left)
            else:
                proposals.append(found)
        said = (replace(one, candidate=f"the scores of {one.candidate}") for one in skipped)
        return Proposed(
            proposals=tuple(proposals),
            skipped=tuple(judged(state.config, OPTION, one) for one in said),
        )

    def region_of(self, proposal: BeforeDown) -> str:
        """Return the name of its region."""
        return proposal.region

    def apply(
        self, graph: fx.Graph, proposals: tuple[BeforeDown, ...], state: CompileState
    ) -> None:
        """Rewrite one region after another; each is found anew."""
        facts = state.facts_of(graph)
        for one in proposals:
            try:
                _carry_out(find_scored_rows(_region(facts, one.dispatch)))
            except Left as left:
                raise ContractViolation(
                    f"{one} were planned, but the graph no longer has these nodes: {left}"
                ) from left
            facts.forget()


def _tried(graph: fx.Graph, region: MoERegion, *, may_round: bool) -> BeforeDown | Left:
    """Return the proposal for a region, or why a copy of the graph does not run so."""
    assert graph.owning_module is not None
    copy = copy_of_graph(graph.owning_module)
    try:
        form = find_scored_rows(_region(GraphFacts(copy.graph), region.dispatch.name))
        _carry_out(form)
        again = _region(GraphFacts(copy.graph), region.dispatch.name)
    except Left as left:
        return left
    proof = prove_rows_independent(again, may_round=may_round)
    if isinstance(proof, Left):
        return Left(Reason.NOT_PROVEN, str(proof))
    return BeforeDown(
        region=region.name,
        dispatch=region.dispatch.name,
        num_products=len(form.products),
        score_type=str(type_of(form.scores)).removeprefix("torch."),
    )


def _region(facts: GraphFacts, dispatch: str) -> MoERegion:
    """Return the region whose dispatch is called so; raise Left where it is none any more."""
    regions, others = find_moe_regions(facts)
    for region in regions:
        if region.dispatch.name == dispatch:
            return region
    raise Left(Reason.NOT_PROVEN, "; ".join(other.why for other in others if other.is_region))


def _carry_out(form: ScoredRows) -> None:
    """Rewrite the graph of a region; raise Left, with the graph half done, where it cannot run."""
    region, graph = form.region, form.region.dispatch.graph
    before = set(graph.nodes)
    launch = _sent(form)
    first, _ = form.products[0]
    arrived = Emitter(first).call(C10D.wait_tensor, launch)
    wide = _wide_type([form.scores, *(rows for _, rows in form.products)])
    scores = ScoresOfRows(region, _as(Emitter(first), arrived, wide, type_of(form.scores)))
    scaled: list[tuple[fx.Node, fx.Node, fx.Node]] = []
    for product, rows in form.products:
        emit, own = Emitter(product), type_of(rows)
        factors = scores.of(rows, emit)
        times = emit.call(operator.mul, _as(emit, rows, wide, own), factors)
        scaled.append((factors, rows, times))
        read_instead(product, rows, _as(emit, times, own, wide))
    ones = _take_off(form)
    _store([node for node in graph.nodes if node not in before], region, ones)
    for factors, rows, times in scaled:
        if shape_of(factors) != [*shape_of(rows)[:-1], 1] or shape_of(times) != shape_of(rows):
            raise Left(
                Reason.UNKNOWN_OPERATOR,
                f"{operator_at(rows)} must have one score for each row, and has not",
            )
    erase_unused(form.late)


def _sent(form: ScoredRows) -> fx.Node:
    """Emit the launch of the scores, right behind that of the rows."""
    dispatch = form.region.dispatch
    emit, env = Emitter(dispatch.next), dict[fx.Node, fx.Node]()
    for node in form.late:
        env[node] = emit.copy(node, env)
    scores = env.get(form.scores, form.scores)
    if form.order is None:
        sent = emit.method("contiguous", scores)
    else:
        slots = emit.method("reshape", scores, -1)
        taken = emit.call(operator.getitem, slots, env.get(form.order, form.order))
        sent = emit.method("unsqueeze", taken, 1)
    splits = output_splits(dispatch), input_splits(dispatch)
    return emit.call(C10D.all_to_all_single, sent, *splits, form.region.group)


def _take_off(form: ScoredRows) -> fx.Node | None:
    """Take the scores off the rows that came back; return ones in their place, if there are any.

    A product of a chain goes. Sums per token keep their form, which passes know.
    """
    emit, weighing = Emitter(form.weighing), form.weighing
    if form.order is not None:
        ones = emit.call(torch.ones_like, form.scores)
        read_instead(weighing, form.scores, ones)
        return ones
    (rows,) = (node for node in weighing.all_input_nodes if node is not form.scores)
    substitute(weighing, _as(emit, rows, type_of(weighing), type_of(rows)))
    return None


def _wide_type(nodes: list[fx.Node]) -> torch.dtype:
    """Return the type in which activations and scores are multiplied: float32 at least."""
    is_double = any(type_of(node) is torch.float64 for node in nodes)
    return torch.float64 if is_double else torch.float32


def _as(emit: Emitter, node: fx.Node, new: torch.dtype | None, old: torch.dtype | None) -> fx.Node:
    return node if new is old else emit.method("to", node, new)


def _store(new: list[fx.Node], region: MoERegion, ones: fx.Node | None) -> None:
    """Give `new` the values of the tracer; ones have no gradient, as counts have none."""
    fake = fake_mode_of([value_of(region.rows)])
    if fake is None:
        raise Left(
            Reason.UNKNOWN_OPERATOR,
            "megamoe needs the fake tensors that torch's tracer attaches to a graph, and this "
            "graph has none",
        )
    try:
        store_values(new, fake, {} if ones is None else {ones: region.counts})
    except UNTRACEABLE as error:
        raise Left(
            Reason.UNKNOWN_OPERATOR,
            f"the experts fail when they are traced with scores that travel with the rows: {error}",
        ) from error
