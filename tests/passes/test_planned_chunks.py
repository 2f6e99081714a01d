"""What the planner decides reaches the plans of a graph, and only where ranks can agree."""

import dataclasses

import torch

from moe_compile.journal.reasons import Reason
from moe_compile.plan.choose_plan import Why
from moe_compile.report.region_reports import decision_figures, decision_remarks
from passes.detect_regions import DetectRegions
from passes.plan_regions import PlanRegions
from tests.capture import dynamo_graphs, state
from tests.layers import GroupedExperts


def planned(fake_ranks, tokens=512, link_gb_per_s=None, experts=8, **options):
    layer = GroupedExperts(64, 128, experts, 2, fake_ranks)
    x = torch.randn(tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(layer, x)
    ours = state(**options)
    if link_gb_per_s:
        ours.hardware = dataclasses.replace(ours.hardware, link_gb_per_s=link_gb_per_s)
    DetectRegions().run(gm.graph, ours)
    PlanRegions().run(gm.graph, ours)
    return ours.experts[0]


def test_without_the_promise_of_equal_tokens_two_chunks_stay(fake_ranks):
    plan = planned(fake_ranks)
    assert (plan.plan.num_chunks, plan.decision) == (2, None)
    assert decision_remarks(plan.decision) == []


def test_with_it_the_number_is_the_decision_and_the_report_says_why(fake_ranks):
    plan = planned(fake_ranks, equal_tokens=True)
    assert plan.plan.num_chunks == plan.decision.chosen.candidate.num_chunks
    assert plan.decision.why in (Why.FASTEST, Why.NO_GAIN, Why.UNSURE)
    said = decision_remarks(plan.decision)[0]
    assert plan.decision.why.value in said and "next" in said
    assert decision_figures(plan.decision)["predicted_us"] == plan.decision.chosen.us


def test_one_expert_a_rank_runs_in_chunks_of_tokens_where_numerics_allows_it(fake_ranks):
    slow = {"equal_tokens": True, "link_gb_per_s": 0.05, "experts": 2}
    assert planned(fake_ranks, **slow).plan.num_chunks == 1
    found = planned(fake_ranks, numerics="bounded", **slow)
    assert found.plan.num_chunks > 1 and found.plan.by_tokens
    assert any("chunks of tokens" in said for said in decision_remarks(found.decision))


def test_rows_too_few_to_be_worth_it_stay_whole(fake_ranks):
    """Two rows: chunks only add latencies and launches."""
    plan = planned(fake_ranks, tokens=2, equal_tokens=True)
    assert (plan.plan.num_chunks, plan.left["chunks"].reason) == (1, Reason.BY_PRICE)


def test_a_number_that_is_asked_for_is_not_the_planners(fake_ranks):
    plan = planned(fake_ranks, tokens=2, equal_tokens=True, chunks=4)
    assert (plan.plan.num_chunks, plan.decision) == (4, None)


def test_wires_quantise_only_where_they_are_left_to_the_planner(fake_ranks):
    plan = planned(fake_ranks, equal_tokens=True)
    assert plan.decision.chosen.candidate.dispatch_wire == "same"
    slow = {"equal_tokens": True, "link_gb_per_s": 0.005}
    free = planned(fake_ranks, chunks=2, dispatch_wire="auto", numerics="lossy", **slow)
    wires = free.decision.chosen.candidate
    assert (wires.dispatch_wire, wires.combine_wire) == ("fp8", "same")
