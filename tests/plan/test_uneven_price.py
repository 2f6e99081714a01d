"""What chunks take where experts are not chosen evenly: rows, ranges and ranks told by hand."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_compile.cost.rates import Rates
from moe_compile.cost.tasks import COMPUTE, LINK, Task
from moe_compile.hardware import load_profile
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.region_tasks import fastest, price_us
from moe_compile.plan.uneven_price import (
    RoutingSkew,
    agreeing_us,
    all_ranks_us,
    even_ranges,
    order_of,
    ranges_by_load,
    skewed_shares,
    together_us,
    uneven_us,
)
from tests.passes.test_load_edges import by_load
from tests.plan.test_choose_plan import UNIT, region


@given(skew=st.floats(0, 1e3), num=st.integers(1, 64), top_k=st.integers(1, 8), seed=st.integers(0))
def test_no_token_chooses_an_expert_twice_whatever_the_skew(skew, num, top_k, seed):
    shares = skewed_shares(skew, num, min(top_k, num), seed)
    assert len(shares) == num and min(shares) >= 0.0 and max(shares) <= 1.0
    assert shares == skewed_shares(skew, num, min(top_k, num), seed)
    if skew <= 2:
        assert sum(shares) == pytest.approx(min(top_k, num))


def test_ranges_told_by_hand():
    rows = [1.0, 5.0, 1.0, 1.0, 3.0, 1.0]
    assert even_ranges(rows, 3) == ((0, 1), (2, 3), (4, 5))
    assert ranges_by_load(rows, 3) == ((0, 1), (2, 3), (4, 5))
    assert ranges_by_load(rows, 2) == ((0, 1), (2, 3, 4, 5))
    assert ranges_by_load([9.0, 0.0, 0.0], 3) == ((0,), (1,), (2,))
    assert ranges_by_load([0.0, 0.0, 9.0], 3) == ((0,), (1,), (2,))


def test_ranges_by_load_are_those_that_are_built():
    draw = random.Random(0)
    for _ in range(100):
        rows = [draw.choice([0, 1, 5, 40]) for _ in range(draw.randint(2, 9))]
        num = draw.randint(2, len(rows))
        groups = ranges_by_load([float(n) for n in rows], num)
        assert by_load(rows, num) == [c for c, group in enumerate(groups) for _ in group]


def test_a_collective_waits_for_all_ranks_and_lasts_as_long_as_that_of_the_last():
    def tasks(compute_us, link_us):
        return (
            Task(name="a", stream=COMPUTE, us=compute_us),
            Task(name="sent", stream=LINK, us=link_us, needs=(0,)),
            Task(name="beside", stream=COMPUTE, us=4.0),
            Task(name="b", stream=COMPUTE, us=10.0, needs=(1,)),
        )

    rates = replace(Rates.of(load_profile("cpu"), 2), contention=0.0, overlap_slowdown=0.0)
    order = [0, 1, 2, 3]
    assert together_us([tasks(10.0, 20.0)], order, rates) == 40.0
    assert together_us([tasks(10.0, 20.0), tasks(15.0, 5.0)], order, rates) == 45.0


def test_ranks_alike_take_as_long_as_one():
    rates = Rates.of(load_profile("h100"), 16)
    assert rates.contention and rates.overlap_slowdown
    made = [Task(name="rows", stream=COMPUTE, us=3.0)]
    for chunk in range(3):
        made.append(Task(name="sent", stream=LINK, us=20.0 + chunk, needs=(0,)))
    for chunk in range(3):
        made.append(Task(name="experts", stream=COMPUTE, us=15.0, needs=(1 + chunk,)))
        made.append(Task(name="back", stream=LINK, us=20.0, needs=(len(made) - 1,)))
    alone = fastest(made, rates).total_us
    assert together_us([made] * 3, order_of(made, rates), rates) == pytest.approx(alone)


def test_even_routing_takes_what_the_price_of_one_rank_says():
    work, even = region(), RoutingSkew(skew=0.0, rows_per_token=2)
    for num in (1, 2, 4):
        candidate = Candidate(num_chunks=num)
        alone = price_us(work, candidate, UNIT)
        assert uneven_us(work, candidate, UNIT, even) == pytest.approx(alone)
    by_load = Candidate(num_chunks=2, chunk_edges="load")
    extra = agreeing_us(work, UNIT)
    assert uneven_us(work, by_load, UNIT, even) == pytest.approx(
        extra + price_us(work, replace(by_load, chunk_edges="even"), UNIT)
    )
    rates = replace(UNIT, op_overhead_us=1.0, num_ranks=8)
    assert agreeing_us(work, rates) == 7 * 64 * 4 / 1e3 + 8


def test_ranges_of_as_many_rows_are_faster_where_the_halves_are_not():
    """Of 4 experts with rows 2 to 0 each way: halves hide nothing, a cut at the middle does."""
    work = region(num_parts=4)
    rows_of = [[0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 0.0, 0.0]] * 4
    two = Candidate(num_chunks=2)
    halves, middles = (
        all_ranks_us(work, two, UNIT, rows_of, [cut(rows, 2) for rows in rows_of])
        for cut in (even_ranges, ranges_by_load)
    )
    assert middles < 0.8 * halves
