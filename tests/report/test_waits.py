"""Measured waits stand beside those predicted, of the rank that waits longest."""

import io

import pytest
from rich.console import Console

from moe_compile.report.waits import (
    MOST_ROWS,
    RankWaits,
    predicted_waits_ms,
    print_waits,
    read_waits,
    waits_of,
)
from moe_compile.schedule.timeline_data import AFTER, packed

SITE = "a.py:3 in forward"
OUT, BACK = (SITE, "forward", "out"), (SITE, "forward", "back")


def report(*waits_us):
    """Return a report on graphs of one place; each has these predicted waits for `out`."""
    nodes = [["out", "c10d::all_to_all_single", "", "collective"]]
    graphs = []
    for us in waits_us:
        run = {"step_us": 9.0, "exposed_us": us, "peak_bytes": 0, "spans": [], "memory": []}
        run["waits"] = [[0, us], [0, 0.0]]
        launch = {"node": 0, "stream": "link 0", "bytes": 8, "region": "", "is_moved": False}
        timeline = packed({"nodes": nodes, "launches": [launch], "runs": {AFTER: run}})
        graphs.append({"where": SITE, "phase": "forward", "timeline": timeline})
    return {"graphs": graphs}


def rank(number, steps=10, **waits):
    found = {(SITE, "forward", node): each for node, each in waits.items()}
    return RankWaits(rank=number, steps=steps, waits=found)


def printed(told, ranks, *, verbose=False):
    text = io.StringIO()
    console = Console(file=text, width=80, color_system=None)
    print_waits(told, ranks, console, verbose=verbose)
    return text.getvalue()


def test_each_collective_has_the_rank_that_waits_longest_for_it():
    ranks = [rank(0, out=(0.2, 20), back=(0.06, 20)), rank(1, out=(0.1, 20), back=(0.08, 20))]
    out, back = waits_of(predicted_waits_ms(report(1500.0)), ranks)
    assert (out.name, out.rank, out.measured_ms, out.per_step) == (OUT, 0, pytest.approx(10.0), 2)
    assert (back.name, back.rank, back.measured_ms) == (BACK, 1, pytest.approx(4.0))
    assert (out.predicted_ms, back.predicted_ms) == (1.5, None)


def test_graphs_of_one_place_count_together():
    (out,) = waits_of(predicted_waits_ms(report(1000.0, 4000.0)), [rank(0, out=(1.0, 20))])
    assert out.predicted_ms == 2.5


def test_the_last_line_has_the_waits_of_a_step_on_the_rank_that_waits_longest():
    ranks = [rank(0, out=(0.2, 20), back=(0.06, 20)), rank(1, out=(0.1, 20), back=(0.08, 20))]
    *table, last = printed(report(1500.0), ranks).splitlines()
    assert last.startswith(
        "Waits of a step: 26.00 ms measured on rank 0, which waits longest; 3.00 ms predicted."
    )
    assert last.endswith("in 10 logged steps after the first.")
    assert any(line.split() == ["out", "1.50", "10.00", "0", "2"] for line in table)
    assert all(len(line) <= 80 for line in table)


def test_of_many_the_longest_are_shown():
    ranks = [rank(0, **{f"n{i}": (i / 1e3, 10) for i in range(1, MOST_ROWS + 4)})]
    short, whole = (printed(report(), ranks, verbose=verbose) for verbose in (False, True))
    assert (
        "3 more collectives have shorter waits than these; --verbose lists them." in short
        and " n3 " not in short
    )
    assert " n4 " in short and " n3 " in whole and "others" not in whole


def test_where_nothing_was_measured_it_says_why():
    assert "lower metrics.log_freq" in printed(report(), [rank(0, steps=0)])
    assert "waits for one" in printed(report(), [rank(0)])


def test_what_ranks_leave_is_read_by_rank_the_last_attempt(tmp_path):
    first, other, again = rank(1, out=(0.5, 2)), rank(0, back=(0.25, 4)), rank(1, out=(0.75, 6))
    for attempt, one in ((2, first), (2, other), (10, again)):
        folder = tmp_path / f"attempt_{attempt}" / str(one.rank)
        folder.mkdir(parents=True)
        one.write(folder)
    assert read_waits(tmp_path) == [other, again]
    (cut_off,) = tmp_path.glob("attempt_10/1/*")
    cut_off.write_text(cut_off.read_text()[:20])
    assert read_waits(tmp_path) == [other, first]


def test_waits_of_more_steps_of_a_rank_add_up():
    both = rank(1, steps=2, out=(0.5, 4)).and_those_of(rank(1, steps=3, out=(0.25, 6), back=(1, 2)))
    assert both == rank(1, steps=5, out=(0.75, 10), back=(1, 2))
