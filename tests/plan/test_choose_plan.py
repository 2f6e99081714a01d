"""The planner on work made by hand, where the best way can be told."""

import dataclasses
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_compile.cost.rates import CONSTANTS, Rates
from moe_compile.cost.region_work import RegionWork, Work
from moe_compile.hardware import load_profile
from moe_compile.plan.candidates import Candidate, list_candidates
from moe_compile.plan.choose_plan import RISK, Why, choose_plan, extra_bytes
from moe_compile.plan.region_tasks import price_us
from tests.region_works import mirrored

UNIT = Rates(  # 1 us per operation of 1e6, byte of 1e3 in memory or 1e3 on the link
    matmul_tflops=1.0,
    memory_gb_per_s=1.0,
    op_overhead_us=0.0,
    link_gb_per_s=1.0,
    link_latency_us=0.0,
    uncertainty=tuple((name, 0.2) for name in CONSTANTS),
)


def bitwise(work):
    return lambda candidate: not candidate.is_lossy(work)


def region(experts_us=100.0, link_us=100.0, filler_us=0.0, num_parts=8, row_bytes=0.0, wires=()):
    """Return dispatch, experts, combine, and something beside them; no weights."""
    sent = {"link_bytes": link_us * 1e3, "written": row_bytes, "is_chunked": True}
    works = (
        Work(name="router", operations=1e6),
        Work(name="dispatch", needs=(0,), exchange="dispatch", **sent),
        Work(name="experts", needs=(1,), operations=experts_us * 1e6, is_chunked=True),
        Work(name="combine", needs=(2,), exchange="combine", **sent),
        Work(name="beside", needs=(0,), operations=filler_us * 1e6),
        Work(name="sum", needs=(3, 4), operations=1e6),
    )
    return RegionWork(
        forward=works,
        backward=mirrored(works),
        num_ranks=8,
        num_parts=num_parts,
        row_bytes=row_bytes,
        wire_shares=dict(wires),
    )


def decide(work, rates=UNIT, **limits):
    return choose_plan(
        work, rates, list_candidates(work, ("experts", "tokens")), bitwise(work), **limits
    )


def test_price_of_one_and_of_two_chunks_is_told_by_hand():
    """Forward: router 1, dispatch 100, experts 100, combine 100, sum 1; backward the same."""
    work = region()
    assert price_us(work, Candidate(), UNIT) == pytest.approx(302 + 302)
    two = Candidate(num_chunks=2)  # the link is busy all the time, 200
    assert price_us(work, two, UNIT) == pytest.approx(202 + 202)


def test_exchanges_are_worth_chunking_and_none_are_not():
    assert decide(region()).chosen.candidate.num_chunks > 1
    alone = decide(region(link_us=1e-3))
    assert (alone.chosen.candidate.num_chunks, alone.why) == (1, Why.NO_GAIN)


def test_one_local_expert_leaves_no_other_way():
    decision = decide(region(num_parts=1))
    assert (decision.why, decision.runner_up) == (Why.NO_OTHER, None)


def test_only_divisors_of_the_local_experts_are_tried():
    ways = {c.num_chunks for c in list_candidates(region(num_parts=6), ("experts",))}
    assert ways == {1, 2}


def test_memory_that_is_not_there_is_not_taken():
    work = region(row_bytes=1e3)
    needed = extra_bytes(work, Candidate(num_chunks=2))
    assert decide(work, allowed_bytes=needed).chosen.candidate.num_chunks > 1
    capped = decide(work, allowed_bytes=needed - 1)
    assert (capped.chosen.candidate.num_chunks, capped.why) == (1, Why.MEMORY)


def test_a_gain_that_a_wrong_constant_would_turn_into_a_loss_is_not_taken():
    """Sorting and joining costs nearly what chunks save; the memory's rate decides."""
    decision = decide(region(row_bytes=1.5 * 15.3e3))
    assert decision.why is Why.UNSURE
    assert decision.chosen.candidate.num_chunks == 1
    assert decision.runner_up.us < 0.99 * decision.chosen.us


def test_a_price_of_the_callers_is_asked_with_constants_off_too():
    """Two chunks gain a third, and lose as much where the link is slower than stated."""

    def price(work, candidate, rates):
        return 3.0 - (candidate.num_chunks > 1) * (1 if rates == UNIT else -1)

    decision = decide(region(), price=price)
    assert decision.why is Why.UNSURE and decision.chosen.us == 3.0


def test_lossy_ways_are_advice_until_they_are_allowed():
    work = region(experts_us=10.0, wires=(("fp8", 0.52),))
    rates = UNIT.scaled("memory_gb_per_s", 1e3)
    decision = decide(work, rates)
    assert not decision.chosen.candidate.is_lossy(work)
    assert decision.advice and all(a.candidate.is_lossy(work) for a in decision.advice)
    assert decision.advice[0].us < 0.99 * decision.chosen.us
    free = choose_plan(work, rates, list_candidates(work, ("experts",)), lambda _: True)
    assert free.chosen.candidate.dispatch_wire == free.chosen.candidate.combine_wire == "fp8"


WORKS = st.builds(
    region,
    experts_us=st.floats(1, 500),
    link_us=st.floats(1, 500),
    filler_us=st.floats(0, 300),
    num_parts=st.sampled_from([1, 2, 4, 6, 8]),
    row_bytes=st.floats(0, 3e4),
)


@settings(deadline=None)
@given(work=WORKS)
def test_the_choice_gains_one_percent_and_loses_half_of_it_at_most_with_a_constant_off(work):
    decision = decide(work)
    assert decision.chosen.us <= decision.as_it_is.us
    if decision.chosen is not decision.as_it_is:
        assert decision.gain > 0.01
        for rates in UNIT.perturbed():
            ours = price_us(work, decision.chosen.candidate, rates)
            limit = 1.0 + RISK * decision.gain
            assert ours < limit * price_us(work, decision.as_it_is.candidate, rates)


def largest_regret(work, way, ways, rates):
    """Return by how much `way` is slower than the best of `ways` at most, constants moved."""
    worlds = (rates, *rates.perturbed())
    return max(
        price_us(work, way, r) / min(price_us(work, other, r) for other in ways) - 1 for r in worlds
    )


def test_two_percent_are_paid_to_be_less_far_off_when_a_constant_is_wrong():
    """Two chunks hide all where links and compute are equal; where one is faster, four do more."""
    work, rates = region(200.0, 200.0), dataclasses.replace(UNIT, link_latency_us=2.0)
    ways = [c for c in list_candidates(work, ("experts",)) if not c.is_lossy(work)]
    decision = decide(work, rates)
    four, two = decision.chosen.candidate, decision.runner_up.candidate
    assert (four.num_chunks, two.num_chunks) == (4, 2)
    assert -0.02 <= decision.margin < -0.015
    assert largest_regret(work, four, ways, rates) < largest_regret(work, two, ways, rates) - 0.01


@settings(deadline=None)
@given(work=WORKS, latency_us=st.floats(0, 10))
@example(work=region(120.0, 100.0, 100.0, row_bytes=1e3), latency_us=2.0)
def test_the_choice_is_never_more_than_two_percent_from_the_fastest_that_is_safe(work, latency_us):
    rates = dataclasses.replace(UNIT, link_latency_us=latency_us)
    decision, worlds = decide(work, rates), list(rates.perturbed())
    was = [price_us(work, decision.as_it_is.candidate, r) for r in worlds]
    for way in list_candidates(work, ("experts",)):
        us = price_us(work, way, rates)
        if way.is_lossy(work) or us >= 0.99 * decision.as_it_is.us:
            continue
        if all(price_us(work, way, r) < w for r, w in zip(worlds, was, strict=True)):
            assert decision.chosen.us <= 1.02 * us


@settings(deadline=None)
@given(work=WORKS, seed=st.integers(0, 99))
def test_the_choice_does_not_depend_on_the_order_of_candidates(work, seed):
    """The first, the region as it is, excepted; equal times go to the simpler way."""
    whole, *others = list_candidates(work, ("experts",))
    random.Random(seed).shuffle(others)
    shuffled = choose_plan(work, UNIT, [whole, *others], bitwise(work))
    assert shuffled.chosen == decide(work).chosen


def test_a_group_within_a_node_has_the_nodes_link():
    profile = load_profile("h100")
    near, far = Rates.of(profile, 8), Rates.of(profile, 64)
    assert near.link_gb_per_s == pytest.approx(450 * 0.6) and far.link_gb_per_s == 45
    assert near.contention == 132 / 116 - 1 and far.contention == 132 / 112 - 1
    assert near.overlap_slowdown == 0.0 and far.overlap_slowdown == 0.4
    assert dict(far.uncertainty)["matmul_tflops"] == 0.2  # assumed, the profile says
