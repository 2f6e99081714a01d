"""What chunks by load are predicted to gain: loads told by hand, and the table of the docs."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner.chunks_by_load import BY_LOAD, EVEN, WAYS, predict
from benchmarks.planner.ranks_together import order_of, together_us
from benchmarks.planner.stated_loads import (
    ROUTINGS,
    any_groups,
    chosen_shares,
    even_ranges,
    ordered,
    ranges_by_load,
    rows_of_ranks,
)
from moe_compile.cost.rates import Rates
from moe_compile.cost.tasks import COMPUTE, LINK, Task
from moe_compile.hardware import load_profile
from moe_compile.plan.region_tasks import fastest
from tests.passes.test_load_edges import by_load

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_tokens_choose_so_many_experts_and_none_twice(routing):
    shares = chosen_shares(routing, 64, 6, seed=3)
    assert sum(shares) == pytest.approx(6) and max(shares) <= 1.0
    rows = rows_of_ranks(shares, 8)
    assert sum(map(sum, rows)) == pytest.approx(8) and {len(of_rank) for of_rank in rows} == {8}


def test_groups_of_experts_told_by_hand():
    rows = [1.0, 5.0, 1.0, 1.0, 3.0, 1.0]
    assert even_ranges(rows, 3) == ((0, 1), (2, 3), (4, 5))
    assert ranges_by_load(rows, 3) == ((0, 1), (2, 3), (4, 5))
    assert ranges_by_load(rows, 2) == ((0, 1), (2, 3, 4, 5))
    assert ranges_by_load([9.0, 0.0, 0.0], 3) == ((0,), (1,), (2,))
    assert ranges_by_load([0.0, 0.0, 9.0], 3) == ((0,), (1,), (2,))
    assert ordered(even_ranges, "largest first")(rows, 3) == ((0, 1), (4, 5), (2, 3))
    assert ordered(even_ranges, "largest inside")(rows, 3) == ((2, 3), (0, 1), (4, 5))
    assert any_groups(rows, 2) == ((1, 3), (4, 0, 2, 5))


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


@pytest.mark.slow
def test_the_page_says_what_chunks_by_load_are_predicted_to_gain():
    lines = re.findall(r"^\| ([\w.-]+), (\d+), (\w+) \| (\d) \| ([\w. ]+) \| (.*) \|$", PAGE, re.M)
    table = {(name, int(n), of, routing): (num, rest) for name, n, of, num, routing, rest in lines}
    for one in predict():
        num, rest = table.pop((*one.cell, one.routing))
        shown = [float(cell.strip().removesuffix(" %")) for cell in rest.split("|")]
        gains = [100 * one.gain(way) for way in WAYS if way != EVEN]
        assert int(num) == one.num_chunks
        assert shown == pytest.approx([one.imbalance, one.us[EVEN] / 1e3, *gains], abs=0.051)
        if one.routing == "even":
            assert one.gain(BY_LOAD) > -0.01
    assert not table
