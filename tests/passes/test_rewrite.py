"""A rewrite proposes data, is judged by numerics and price, and is undone where it fails."""

import dataclasses
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_compile.errors import ContractViolation
from moe_compile.journal.entries import Dropped, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.plan.plan_digest import groups_rewritten, level_value, plan_digest
from moe_compile.predicted_time import predicted_us
from passes.pipeline import DYNAMO, Level, run_level
from passes.rewrite import Proposed, Rewrite
from tests.capture import dynamo_graphs, state
from tests.layers import GroupedExperts
from tests.slow_parameters import slow_but


@dataclass(frozen=True)
class ToCosine(Rewrite[str]):
    """Has each sine be a cosine: easy to see, and said to lose what a test says."""

    name = "to_cosine"
    fails: bool = False
    breaks: bool = False

    def propose(self, graph, state):
        kept = Verdict(candidate="all else", reason=Reason.OTHER, detail="it is no sine")
        sines = (n.name for n in graph.nodes if n.target is torch.sin)
        return Proposed(proposals=tuple(sines), skipped=(kept,))

    def apply(self, graph, proposals, state):
        for node in graph.nodes:
            if node.name in proposals:
                node.target = torch.cos
                if self.breaks:
                    graph.output_node().append(node)
        if self.fails:
            raise RuntimeError("half way")


@dataclass(frozen=True)
class Bounded(ToCosine):
    name = "bounded"
    numerics = "bounded"
    bound = "by 2"


@dataclass(frozen=True)
class Lossy(Bounded):
    name = "lossy"
    numerics = "lossy"


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x) + 1


def run(rewrite, times=None, graph_name="dynamo", **options):
    """Return the result of `rewrite` and the state after it; `times` are without and with it."""
    (gm,) = dynamo_graphs(Sine(), torch.ones(3))
    compile_state = state(**options)
    compile_state.begin_graph(graph_name)

    def predict(copy, is_rewritten):
        assert copy.graph is not gm.graph
        assert (torch.cos in {n.target for n in copy.graph.nodes}) == is_rewritten
        return times[is_rewritten]

    compile_state.predict = predict if times is not None else None
    passes = (DYNAMO.passes[0], rewrite)
    _, result = run_level(Level(passes), gm.graph, compile_state)
    dropped = {result.pass_name} if isinstance(result, Dropped) else set()
    compile_state.withdraw(dropped)
    assert (torch.cos in {n.target for n in gm.graph.nodes}) == (not dropped and result.changed)
    return result, compile_state


def test_what_is_proposed_is_done_joins_the_plan_and_makes_later_levels_run():
    result, after = run(ToCosine())
    assert result.applied == ("sin",)
    (left,) = map(str, result.skipped)
    assert left == "all else: no reason in megamoe's list fits (it is no sine)"
    assert after.has_work and after.has_outside_rewrites
    (plan,) = after.plan.rewrites
    assert (plan.name, plan.proposals) == ("to_cosine", ("'sin'",))
    without = run(ToCosine(), disable_passes=("to_cosine",))
    assert isinstance(without[0], Dropped) and not without[1].has_work
    digests = set()
    for each in (after, without[1]):
        level = level_value(torch.fx.Graph(), each, dropped=())
        digests.add(plan_digest(after.config, [level], {}))
    assert len(digests) == 2
    stated = dataclasses.replace(after.config, routing_skew=0.5)
    level = level_value(torch.fx.Graph(), after, dropped=())
    assert plan_digest(stated, [level], {}) in digests  # prices go by it, and code by decisions
    collectives = {"0": ["all_reduce(float32, sum)"]}
    assert groups_rewritten(after, collectives) == {"0"} > groups_rewritten(without[1], collectives)


@pytest.mark.parametrize(
    ("rewrite", "allowed", "reason"),
    [
        (Bounded(), "exact", Reason.ROUNDS),
        (Bounded(), "bounded", None),
        (Lossy(), "bounded", Reason.ROUNDS),
        (Lossy(), "lossy", None),
    ],
)
def test_what_the_option_does_not_allow_is_skipped(rewrite, allowed, reason):
    result, after = run(rewrite, numerics=allowed)
    if reason is None:
        assert result.applied == (f"sin ({rewrite.numerics}: by 2)",)
        return
    assert not result.applied and not after.has_work
    left = result.skipped[-1]
    assert (left.candidate, left.reason) == ("sin", reason)
    assert left.detail.endswith(f"megamoe.numerics = {rewrite.numerics!r} allows it")


@pytest.mark.parametrize(
    ("with_it", "pays"), [(1.0, True), (2.0, True), (2.01, True), (2.03, False), (2.5, False)]
)
def test_what_is_predicted_to_take_longer_is_skipped(with_it, pays):
    result, after = run(ToCosine(), (2.0, with_it), equal_tokens=True)
    assert result.measures == {"predicted_us_before": 2.0, "predicted_us": with_it}
    assert after.has_work == pays
    if not pays:
        assert result.skipped[-1].reason is Reason.BY_PRICE
        assert f"predicted {with_it} us with it, 2.0 us without" in result.skipped[-1].detail


def test_there_is_no_price_where_ranks_might_have_others():
    result, _ = run(ToCosine(), (2.0, 2.5))
    assert result.applied and result.measures == {}


def test_there_is_no_price_of_a_body():
    result, _ = run(ToCosine(), (2.0, 2.5), "dynamo/wrap_body_0", equal_tokens=True)
    assert result.applied and result.measures == {}


def test_no_price_of_a_symbolic_size():
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(Sine(), backend=keep, dynamic=True)(torch.ones(3, 5))
    after = state(equal_tokens=True)
    after.predict = lambda gm, is_rewritten: float(is_rewritten)
    _, result = run_level(Level((DYNAMO.passes[0], ToCosine())), graphs[0], after)
    assert result.applied and result.measures == {}


def test_one_that_fails_half_way_leaves_the_graph_and_the_plan_as_they_were():
    result, after = run(ToCosine(fails=True))
    assert (result.reason, result.detail) == (Reason.FAILED, "RuntimeError: half way")
    assert not after.plan.rewrites and not after.has_work
    with pytest.raises(RuntimeError, match="half way"):
        run(ToCosine(fails=True), strict=True)


def test_one_that_leaves_a_graph_that_cannot_run_is_undone_too():
    result, after = run(ToCosine(breaks=True))
    assert result.reason is Reason.FAILED
    assert not after.plan.rewrites and not after.has_work


class Place:
    """Prints where it lies."""


@dataclass(frozen=True)
class ByPlace(ToCosine):
    name = "by_place"
    place: Place = field(default_factory=Place)

    def propose(self, graph, state):
        return Proposed(proposals=(self.place,))


def test_a_proposal_that_prints_otherwise_on_other_ranks_is_none():
    with pytest.raises(ContractViolation, match="must be the same on every rank"):
        run(ByPlace(), strict=True)


@dataclass(frozen=True)
class Watches(ToCosine):
    """Sees after one that failed whether the launches of regions are the graph's."""

    name = "watches"

    def propose(self, graph, state):
        (launches,) = state.launches.values()
        found = [n for nodes in launches.values() for n in nodes]
        assert found and all(n in set(graph.nodes) for n in found)
        return Proposed(proposals=("seen",))


class SineOfExperts(GroupedExperts):
    def forward(self, x):
        return torch.sin(super().forward(x))


def test_the_launches_of_regions_are_the_graphs_after_a_failure(fake_ranks):
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(SineOfExperts(16, 24, 8, 2, fake_ranks), x)
    level = Level((*DYNAMO.passes, ToCosine(fails=True), Watches()))
    *_, failed, watched = run_level(level, gm.graph, state(chunks=2))
    assert failed.reason is Reason.FAILED and watched.applied == ("seen",)


@pytest.mark.parametrize("needs_gradient", slow_but([False], [True, False]))
def test_time_is_predicted_of_both_directions_and_leaves_graph_and_state(
    fake_ranks, needs_gradient
):
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=needs_gradient)
    layer = GroupedExperts(16, 24, 8, 2, fake_ranks).requires_grad_(needs_gradient)
    (gm,) = dynamo_graphs(layer, x)
    before, compile_state = str(gm.graph), state(hardware="h100", equal_tokens=True)
    as_written = predicted_us(gm, compile_state, is_rewritten=False)
    scheduled = predicted_us(gm, compile_state, is_rewritten=True)
    assert 0 < scheduled < as_written
    assert scheduled == predicted_us(gm, compile_state, is_rewritten=True)
    assert str(gm.graph) == before
    assert not compile_state.has_work and not compile_state.journal.records
    assert not compile_state.measures and not compile_state.nominal_sizes


class CheckpointedExperts(GroupedExperts):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_a_graph_whose_body_has_exchanges_is_taken_to_be_scheduled_in_any_case(fake_ranks):
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    gm, _ = dynamo_graphs(CheckpointedExperts(16, 24, 8, 2, fake_ranks), x)
    times = [predicted_us(gm, state(hardware="h100"), is_rewritten=new) for new in (False, True)]
    assert times[0] == times[1] > 0


def test_more_is_predicted_where_gradients_flow(fake_ranks):
    times = []
    for needs_gradient in (False, True):
        x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=needs_gradient)
        layer = GroupedExperts(16, 24, 8, 2, fake_ranks).requires_grad_(needs_gradient)
        (gm,) = dynamo_graphs(layer, x)
        times.append(predicted_us(gm, state(hardware="h100"), is_rewritten=True))
    assert times[1] > 1.5 * times[0]
