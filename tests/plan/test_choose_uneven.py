"""Edges and numbers of chunks under a stated skew: by load where that is predicted to gain."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compile.plan.candidates import Candidate
from moe_compile.plan.uneven_price import EDGES, RoutingSkew, Uneven, choose_uneven, uneven_us
from moe_compile.report.region_reports import decision_figures, decision_remarks
from tests.plan.test_choose_plan import UNIT, region

SKEWED = RoutingSkew(skew=0.7, rows_per_token=2)


def decide(work, routing=SKEWED, numbers=(2,), edges=EDGES, rates=UNIT):
    uneven = Uneven(routing=routing, exchanged=Candidate(), numbers=numbers, edges=edges)
    return choose_uneven(work, rates, uneven)


def test_skewed_rows_go_by_load_and_even_ones_do_not():
    decision = decide(region())
    assert decision.chosen.candidate.chunk_edges == "load"
    assert decision.other_edges.us > 1.01 * decision.chosen.us
    even = decide(region(), dataclasses.replace(SKEWED, skew=0.0))
    assert even.chosen.candidate.chunk_edges == "even"


def test_edges_by_load_that_gain_less_than_one_percent_are_no_candidate():
    """A little skew: 502.3 us by load, 507.3 at even distances."""
    decision = decide(region(), dataclasses.replace(SKEWED, skew=0.3))
    assert decision.chosen.candidate.chunk_edges == "even"
    assert 0.99 * decision.chosen.us < decision.other_edges.us < decision.chosen.us


def test_the_number_of_chunks_is_priced_with_the_skew_too():
    """Two chunks hide links where all is even; where one expert has most rows, nothing does."""
    work = dataclasses.replace(region(row_bytes=4e3), num_parts=2)
    even = decide(work, RoutingSkew(skew=0.0, rows_per_token=1), (1, 2))
    hot = decide(work, RoutingSkew(skew=9.0, rows_per_token=1), (1, 2))
    assert (even.chosen.candidate.num_chunks, hot.chosen.candidate.num_chunks) == (2, 1)


def test_as_many_chunks_as_experts_and_named_edges_leave_no_choice():
    whole = decide(region(num_parts=2), numbers=(1, 2))
    assert whole.chosen.candidate.chunk_edges == "even" and whole.other_edges is None
    named = decide(region(), edges=("load",), numbers=(1, 2, 4))
    assert named.chosen.candidate.chunk_edges == "load"
    assert decide(region(), edges=("even",)).chosen.candidate.chunk_edges == "even"


def test_each_way_has_a_place_of_its_own():
    """Where two are equally good the simpler is taken, whatever order they come in."""
    numbers, wires = (1, 2, 4), ("same", "fp8")
    ways = [
        Candidate(num_chunks=num, chunk_edges=edges, dispatch_wire=a, combine_wire=b)
        for num, edges, a, b in itertools.product(numbers, EDGES, wires, wires)
    ]
    assert len({way.complexity for way in ways}) == len(set(ways))
    even = Candidate(num_chunks=2)
    assert even.complexity < dataclasses.replace(even, chunk_edges="load").complexity


def test_the_report_says_what_each_costs_and_under_which_skew():
    decision = decide(region(), numbers=(1, 2, 4))
    (said, *_) = decision_remarks(decision)
    assert said.startswith("planned for experts that are chosen unevenly, by routing_skew = 0.7: ")
    assert str(decision.chosen.candidate) in said and str(decision.other_edges.candidate) in said
    figures = decision_figures(decision)
    assert figures["routing_skew"] == 0.7
    assert figures["other_edges_us"] == decision.other_edges.us > figures["predicted_us"]


WORKS = st.builds(
    region,
    experts_us=st.floats(1, 500),
    link_us=st.floats(1, 500),
    filler_us=st.floats(0, 300),
    num_parts=st.sampled_from([4, 6, 8]),
    row_bytes=st.floats(0, 3e4),
)


@settings(deadline=None, max_examples=25)
@given(work=WORKS, skew=st.floats(0, 2), top_k=st.integers(1, 4), latency_us=st.floats(0, 10))
def test_edges_by_load_are_never_chosen_where_they_are_predicted_to_be_slower(
    work, skew, top_k, latency_us
):
    routing = RoutingSkew(skew=skew, rows_per_token=top_k)
    rates = dataclasses.replace(UNIT, link_latency_us=latency_us)
    decision = decide(work, routing, (1, 2), rates=rates)
    chosen = decision.chosen.candidate
    assert decision.chosen.us == pytest.approx(uneven_us(work, chosen, rates, routing))
    if chosen.chunk_edges == "load":
        even = dataclasses.replace(chosen, chunk_edges="even")
        assert decision.chosen.us < 0.99 * uneven_us(work, even, rates, routing)
        assert decision.chosen.us < 0.99 * decision.as_it_is.us
