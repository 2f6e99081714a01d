"""How one way is picked of several, on prices that are told by hand.

A wire in eight bits halves an exchange and costs a packing, whose time the memory's rate decides;
two chunks hide half of what follows the exchange.
"""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork, Work
from moe_compile.plan import decide
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.choose_plan import Why, choose_plan, extra_bytes
from moe_compile.plan.region_tasks import price_us

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
WHOLE, CHUNKS = Candidate(), Candidate(num_chunks=2)
DISPATCH, COMBINE = Candidate(dispatch_wire="fp8"), Candidate(combine_wire="fp8")
BOTH = Candidate(dispatch_wire="fp8", combine_wire="fp8")
RATES = Rates(
    matmul_tflops=1.0,
    memory_gb_per_s=1.0,
    op_overhead_us=0.0,
    link_gb_per_s=1.0,
    link_latency_us=0.0,
)


def region(dispatch_us, experts_us, combine_us=0.0, row_bytes=0.0):
    """Return work without backward: each exchange, and the experts, take so long forward."""
    chunk = {"is_chunked": True}
    work = (
        Work(name="dispatch", link_bytes=dispatch_us * 1e3, exchange="dispatch", **chunk),
        Work(name="experts", needs=(0,), operations=experts_us * 1e6, **chunk),
        Work(name="combine", needs=(1,), link_bytes=combine_us * 1e3, exchange="combine", **chunk),
    )
    return RegionWork(
        forward=work, num_ranks=8, num_parts=2, row_bytes=row_bytes, wire_shares={"fp8": 0.5}
    )


def packing(us, *, unsure):
    """Return rates with which packing 100 us of exchange, twice 1.5 its bytes, takes `us`."""
    return dataclasses.replace(
        RATES, memory_gb_per_s=300.0 / us, uncertainty=(("memory_gb_per_s", unsure),)
    )


def choose(work, rates, *ways, allowed=None, **limits):
    return choose_plan(work, rates, ways, lambda w: allowed is None or w in allowed, **limits)


def test_of_ways_equally_fast_within_two_thousandths_the_simpler_is_taken():
    """501 with one wire, 500.5 with both; the other is the runner-up, though it is faster."""
    decision = choose(region(1000, 0, 1), packing(1e-6, unsure=0.2), WHOLE, COMBINE, BOTH, DISPATCH)
    assert decision.chosen.candidate == DISPATCH
    assert decision.runner_up.candidate == BOTH
    assert decision.margin == pytest.approx(500.5 / 501 - 1)
    farther = choose(region(1000, 0, 4), packing(1e-6, unsure=0.2), WHOLE, COMBINE, BOTH, DISPATCH)
    assert farther.chosen.candidate == BOTH and farther.runner_up.candidate == DISPATCH


def test_equal_candidates_are_priced_once_whatever_else_is_allowed(monkeypatch):
    decide.forget()
    asked = []

    def counted(work, candidate, rates):
        asked.append((candidate, rates))
        return price_us(work, candidate, rates)

    monkeypatch.setattr(decide, "price_us", counted)
    work, ways = region(100, 56), (WHOLE, CHUNKS, DISPATCH)
    for allowed in ({WHOLE, CHUNKS}, {*ways}):
        decision = decide._chosen(work, packing(20, unsure=0.5), ways, frozenset(allowed), math.inf)
        assert decision == choose(work, packing(20, unsure=0.5), *ways, allowed=allowed)
    assert len(asked) == len({*asked}) > 0


def test_a_way_that_is_best_as_stated_and_farthest_off_with_a_wrong_constant_is_not_taken():
    """The wire: 126 stated, 146 and 119 with the memory slower and faster; two chunks: 128."""
    work, rates = region(100, 56), packing(20, unsure=0.5)
    assert price_us(work, DISPATCH, rates) == pytest.approx(126)
    assert price_us(work, CHUNKS, rates) == pytest.approx(128)
    decision = choose(work, rates, WHOLE, DISPATCH, CHUNKS)
    assert (decision.chosen.candidate, decision.why) == (CHUNKS, Why.FASTEST)
    assert decision.margin < 0
    sure = dataclasses.replace(rates, uncertainty=())
    assert choose(work, sure, WHOLE, DISPATCH, CHUNKS).chosen.candidate == DISPATCH


def test_of_the_candidates_in_the_example_of_the_page_the_one_is_taken_that_it_says():
    cells = re.findall(r"\| (\d) chunks \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (.*) \|", PAGE)
    (whole,) = re.findall(r"the unchanged region takes ([\d.]+) ms with every constant", PAGE)
    times = {WHOLE: [float(whole)] * 3}
    times |= {Candidate(num_chunks=int(n)): [float(t) for t in us] for n, *us, _ in cells}
    rates = dataclasses.replace(RATES, uncertainty=(("link_gb_per_s", 0.2),))

    def price(work, candidate, changed):
        link = changed.link_gb_per_s / rates.link_gb_per_s
        return times[candidate][0 if link == 1 else 1 if link < 1 else 2]

    decision = choose(region(1e-3, 1e-3), rates, *times, price=price)
    assert [int(n) for n, *_, said in cells if said.endswith("taken")] == [
        decision.chosen.candidate.num_chunks
    ]
    assert len(cells) == 3 and decision.runner_up.candidate.num_chunks == 8


def test_where_the_fastest_might_lose_the_next_that_cannot_is_taken():
    """The wire: 100 of 120, but 130 with the memory at half its rate; two chunks: 110."""
    decision = choose(region(100, 20), packing(30, unsure=0.5), WHOLE, DISPATCH, CHUNKS)
    assert (decision.chosen.candidate, decision.why) == (CHUNKS, Why.FASTEST)
    alone = choose(region(100, 20), packing(30, unsure=0.5), WHOLE, DISPATCH)
    assert (alone.chosen.candidate, alone.why) == (WHOLE, Why.UNSURE)


def test_where_the_fastest_has_no_room_the_next_that_has_is_taken():
    work = dataclasses.replace(region(100, 100, row_bytes=1e-3), writes_joined=True)
    decision = choose(work, packing(20, unsure=0.2), WHOLE, CHUNKS, DISPATCH, allowed_bytes=1e-3)
    assert (decision.chosen.candidate, decision.why) == (DISPATCH, Why.FASTEST)


def test_chunks_keep_two_more_copies_of_the_rows_where_these_are_written():
    work = dataclasses.replace(region(100, 100, row_bytes=7.0), writes_joined=True)
    assert (extra_bytes(work, WHOLE), extra_bytes(work, DISPATCH)) == (0.0, 0.0)
    assert extra_bytes(work, CHUNKS) == 14.0
    in_place = dataclasses.replace(work, writes_joined=False)
    assert extra_bytes(in_place, CHUNKS) == 0.0
    assert extra_bytes(dataclasses.replace(in_place, in_slices=True), CHUNKS) == 14.0


def test_advice_is_what_was_not_allowed_and_is_faster_by_more_than_one_percent():
    """200 as it is; a wire each saves 30 and 0.3; two chunks have no room, and are no advice."""
    work = region(100, 99, 1)
    rates = packing(20, unsure=0.2)
    ways = (WHOLE, CHUNKS, COMBINE, DISPATCH, BOTH)
    decision = choose(work, rates, *ways, allowed=(WHOLE, CHUNKS), allowed_bytes=-1.0)
    assert (decision.chosen.candidate, decision.why) == (WHOLE, Why.MEMORY)
    assert decision.runner_up.candidate == CHUNKS
    assert [way.candidate for way in decision.advice] == [BOTH, DISPATCH]
    assert [way.candidate for way in decision.ranked] == [CHUNKS, WHOLE]  # allowed, fastest first
