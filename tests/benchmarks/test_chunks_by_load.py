"""What chunks by load are predicted to gain: loads told by hand, and the table of the docs."""

import re
from pathlib import Path

import pytest

from benchmarks.planner.chunks_by_load import BY_LOAD, EVEN, WAYS, choose, predict
from benchmarks.planner.stated_loads import ROUTINGS, any_groups, chosen_shares, ordered
from moe_compile.plan.uneven_price import even_ranges, rows_of_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_tokens_choose_so_many_experts_and_none_twice(routing):
    shares = chosen_shares(routing, 64, 6, seed=3)
    assert sum(shares) == pytest.approx(6) and max(shares) <= 1.0
    rows = rows_of_ranks(shares, 8)
    assert sum(map(sum, rows)) == pytest.approx(8) and {len(of_rank) for of_rank in rows} == {8}


def test_groups_of_experts_told_by_hand():
    rows = [1.0, 5.0, 1.0, 1.0, 3.0, 1.0]
    assert ordered(even_ranges, "largest first")(rows, 3) == ((0, 1), (4, 5), (2, 3))
    assert ordered(even_ranges, "largest inside")(rows, 3) == ((2, 3), (0, 1), (4, 5))
    assert any_groups(rows, 2) == ((1, 3), (4, 0, 2, 5))


@pytest.mark.slow
def test_the_page_says_what_chunks_by_load_are_predicted_to_gain():
    lines = re.findall(
        r"^\| ([\w.-]+), (\d+), (\w+) \| (\d) \| ([a-zA-Z][\w. ]+) \| (.*) \|$", PAGE, re.M
    )
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


@pytest.mark.slow
def test_the_page_says_what_auto_chooses_under_each_skew():
    cells = r" \| (\d[^|]*)" * 3
    lines = re.findall(rf"^\| ([\w.-]+), (\d+), (\w+){cells} \|$", PAGE, re.M)
    said = {(name, int(n), of): tuple(cells) for name, n, of, *cells in lines}
    for cell, chosen in choose():
        edges = {"even": "", "load": " by load"}
        found = tuple(f"{one.num_chunks}{edges[one.chunk_edges]}" for one in chosen.values())
        assert said.pop(cell) == found
    assert not said
