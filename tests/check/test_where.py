"""Collectives of a trace beside those of a report, and what explains their differences."""

import io

import pytest
from rich.console import Console

from moe_compile.check.explained_errors import (
    AS_PREDICTED,
    BANDWIDTH,
    COMPUTE,
    LATENCY,
    LAUNCH,
    NONE,
    NOT_PREDICTED,
    PEERS,
    because,
    compute_of,
    fits_of,
    rows_of,
)
from moe_compile.check.matched_collectives import Window, match
from moe_compile.check.profiler_trace import GRAPH, trace_of
from moe_compile.check.sections import Record, read_section
from moe_compile.check.summary import constants, says_where, table_of_where
from moe_compile.check.where import Found, Pieces, judge_contention, judge_window
from moe_compile.hardware.links import Link
from moe_compile.schedule.timeline import keep_timeline
from moe_compile.schedule.timeline_data import AFTER, packed

LINK = Link(gb_per_s=1.0, latency_us=10.0)
EXCHANGE = "_c10d_functional::all_to_all_single"
GATHER = "_c10d_functional::all_gather_into_tensor"
PLANNED = (100.0, 400.0)
"""Predicted times of the two exchanges of a graph."""


def planned(operators=(EXCHANGE, EXCHANGE), scheduled=True):
    """Return the record of a graph whose first exchange is half hidden and whose last is not."""
    names = [f"x{i}" for i in range(len(operators))]
    nodes = [[n, op, f"m.py:{i} in f", "collective"] for i, (n, op) in
             enumerate(zip(names, operators, strict=True))]  # fmt: skip
    nodes.append(["mm", "aten::mm", "", "product"])
    spans = [[0, "link ep (7)", 0.0, PLANNED[0]], [2, "compute", 50.0, 50.0]]
    spans += [[1, "link ep (7)", 100.0, PLANNED[1]]]
    run = {"spans": spans, "memory": [], "step_us": 500.0, "exposed_us": 450.0, "peak_bytes": 0}
    launches = [{"node": i, "stream": "link ep (7)"} for i in range(len(names))]
    data = {"nodes": nodes, "launches": launches, "runs": {AFTER: run}}
    return {
        "site": "m.py:1 in f",
        "phase": "forward",
        "numbers": {"7": [*range(1, len(names) + 1)]},
        "launches": {"7": [f"{n} = {op}(f32[8])" for n, op in zip(names, operators, strict=True)]},
        "timeline": keep_timeline(packed(data), is_cached=False) if scheduled else "",
    }


def event(name, begin, length, cat="cpu_op", tid=1):
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, "ts": begin, "dur": length}


def run_of(begin, works, operators=(EXCHANGE, EXCHANGE), kinds=("all_to_all", "all_to_all")):
    """Return the events of one run; `works` have each collective's begin, time, and its wait's."""
    found = [event(GRAPH, begin, 1)]
    posted = {EXCHANGE: "c10d::alltoall_base_", GATHER: "c10d::_allgather_base_"}
    for i, (operator, kind, (at, took, wait)) in enumerate(
        zip(operators, kinds, works, strict=True)
    ):
        found += [
            event(operator, begin + 2 + i, 1),
            event(posted[operator], begin + 2 + i, 0.5),
            event(f"gloo:{kind}", begin + at, took, "user_annotation", 2),
            event("_c10d_functional::wait_tensor", begin + wait, at + took - wait),
        ]
    return found


def window(*works, records=None, begins=(0, 1000), **more):
    """Return what a rank saw: one run of the graph for each of `works`."""
    events = [e for begin, w in zip(begins, works, strict=False) for e in run_of(begin, w, **more)]
    record = planned()
    trace = trace_of({"traceEvents": [*events, event("aten::mm", 2000, 1)]})
    return match(trace, records or [record] * len(works), lambda _: LINK)


def test_a_collective_is_told_beside_its_prediction():
    rows = list(rows_of([window([(10, 100, 60), (110, 400, 110)])]))
    first, second = rows
    assert (first["graph"], first["number"], first["where"]) == (
        "forward at m.py:1 in f",
        1,
        "m.py:0 in f",
    )
    assert first["predicted"] == {"total_us": 100, "hidden_us": 50, "exposed_us": 50}
    assert (first["measured"]["total_us"], first["measured"]["hidden_us"]) == (100, 50)
    assert second["measured"]["exposed_us"] == second["predicted"]["exposed_us"] == 400
    assert [row["because"] for row in rows] == [AS_PREDICTED] * 2


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ((10, 190, 60), (200, 490, 200), LATENCY),  # 90 more of each
        ((10, 280, 60), (300, 1180, 300), BANDWIDTH),  # three times each
    ],
)
def test_sizes_tell_latency_from_bandwidth(first, second, wanted):
    (found,) = [window([first, second])]
    assert list(rows_of([found]))[1]["because"] == wanted
    fit = fits_of([found])["link ep"]
    assert fit.is_separated
    assert fit.gb_per_s == pytest.approx(1.0 if wanted == LATENCY else 1 / 3, rel=0.05)


def test_a_rank_that_came_early_waited_for_the_other_and_no_clock_is_read():
    late, early = window([(10, 100, 60), (110, 400, 110)]), window([(10, 100, 60), (110, 700, 110)])
    row = list(rows_of([late, early]))[1]
    assert (row["rank"], row["measured"]["transfer_us"], row["because"]) == (1, 400, PEERS)


def test_a_thread_that_took_a_collective_up_late_is_told():
    seen = window([(150, 100, 150), (260, 400, 260)]).seen
    late = [one.late_us for runs in seen.values() for one in runs]
    assert late == pytest.approx([148, 10])  # the second waited for the first before


def test_of_several_runs_the_one_of_median_exposed_time_is_told():
    found = window([(10, 100, 60), (110, 400, 110)], [(10, 160, 60), (170, 400, 170)])
    assert found.faults == []
    first, _ = rows_of([found])
    assert (first["runs"], first["measured"]["total_us"]) == (2, 100)


def test_runs_that_cannot_be_told_apart_are_not_compared():
    found = window([(10, 100, 60), (110, 400, 110)], records=[planned()] * 2)
    assert not found.seen
    assert (
        "has 1 runs of compiled graphs with collectives, but 2 such graphs ran" in found.faults[0]
    )


def test_a_run_with_other_launches_than_the_reports_is_left_out_and_said():
    found = window([(10, 100, 60), (110, 400, 110)], records=[planned((EXCHANGE, GATHER))])
    assert not found.seen
    assert (
        "launch 2 is all_gather_into_tensor in the report but all_to_all_single" in found.faults[0]
    )


def test_a_run_that_is_left_out_on_one_rank_shifts_no_number_of_those_after_it():
    works = [(10, 100, 60), (110, 400, 110)]
    record, other = planned(), planned((EXCHANGE, GATHER))
    theirs, ours = window(works, works), window(works, works, records=[other, record])
    assert [one.number for one in theirs.seen["forward at m.py:1 in f", 1]] == [1, 3]
    assert [one.number for one in ours.seen["forward at m.py:1 in f (2)", 1]] == [3]


def test_variants_that_generated_code_calls_are_the_same_collective():
    events = run_of(0, [(10, 100, 60), (110, 400, 110)])
    for e in events:
        e["name"] = e["name"].replace("all_to_all_single", "all_to_all_single_out")
    trace = trace_of({"traceEvents": events})
    assert len(match(trace, [planned()], lambda _: LINK).seen) == 2


def test_a_graph_without_a_schedule_is_measured_and_has_no_prediction():
    found = window([(10, 100, 60), (110, 400, 110)], records=[planned(scheduled=False)])
    assert [row["because"] for row in rows_of([found])] == [NOT_PREDICTED] * 2


def test_compute_between_collectives_is_compared_with_the_predicted():
    assert compute_of([window([(10, 100, 60), (110, 400, 110)])]) == {
        "forward at m.py:1 in f": pytest.approx(1.0)
    }
    assert compute_of([Window()]) == {}


@pytest.mark.parametrize(
    ("error", "terms", "wanted"),
    [
        (9, {LATENCY: 9}, AS_PREDICTED),
        (90, {LATENCY: 9, LAUNCH: 80}, LAUNCH),
        (-90, {LATENCY: 200, COMPUTE: -60, BANDWIDTH: -20}, COMPUTE),
        (-90, {LATENCY: 200}, NONE),
    ],
)
def test_the_largest_term_of_an_errors_sign_explains_it(error, terms, wanted):
    assert because(error, 100, terms) == wanted


def test_a_gpu_without_work_beside_a_collective_waited_for_the_host():
    """A kernel that was launched 60 us after the one before it ended came late by those."""

    def kernel(name, begin, length, number):
        kind = {"cat": "kernel", "args": {"correlation": number}}
        return event(name, begin, length) | kind

    calls = [event("cudaLaunchKernel", at, 1, "cuda_runtime") | {"args": {"correlation": n}}
             for n, at in ((1, 2), (2, 3), (3, 210))]  # fmt: skip
    trace = trace_of({"traceEvents": [
        event(GRAPH, 0, 1), event(EXCHANGE, 2, 0.5), event(EXCHANGE, 400, 1), *calls,
        event("cudaLaunchKernel", 400.5, 0.2, "cuda_runtime") | {"args": {"correlation": 4}},
        kernel("ncclX", 100, 200, 1), kernel("gemm", 100, 50, 2), kernel("gemm", 220, 10, 3),
        kernel("ncclX", 500, 10, 4),
    ]})  # fmt: skip
    found = match(trace, [planned()], lambda _: LINK)
    first = found.seen["forward at m.py:1 in f", 1][0]
    assert (first.hidden_us, first.late_us) == (60, 60)


def test_compute_beside_a_collective_is_compared_with_equal_compute_alone():
    busy = [event("aten::mm", 20, 30), event("aten::mm", 200, 20), event("aten::add", 60, 10)]
    trace = trace_of({"traceEvents": [
        event("c10d::alltoall_base_", 0, 5),
        event("gloo:all_to_all", 10, 90, "user_annotation", 2),
        *busy,
    ]})  # fmt: skip
    pieces = Pieces()
    pieces.add(trace)
    assert pieces.ratios() == [1.5]  # the addition never ran alone
    pieces.add(trace, only_alone=True)
    assert pieces.ratios() == [1.5]


def found(*works, nothing="", **more):
    totals = {"hidden_ms": 1.0, "exposed_ms": 2.0}
    seen = window(*works, **more) if works else Window(faults=["2 runs in the trace, and 1 ran"])
    return Found(window=seen, totals=totals, step_s=1.0, profiled_step_s=1.2, nothing=nothing)


def judged(tmp_path, *ranks):
    record = Record(path=tmp_path / "where.json", deadline=1e12)
    judge_window("cpu", record, [*ranks])
    judge_contention(record, [[1.1] * 5, [1.3] * 5])
    return read_section(tmp_path, "where")


def test_the_table_and_the_lines_have_what_was_measured(tmp_path):
    section = judged(tmp_path, found([(10, 280, 60), (300, 1180, 300)]))
    assert section["failures"] == []
    console = Console(width=132, record=True, file=io.StringIO())
    console.print(table_of_where(section))
    said = console.export_text()
    assert "forward at m.py:1" in said and "2 all_to_all m.py:1" in said
    (line,) = [line for line in said.splitlines() if "2 all_to_all m.py:1" in line]
    assert line.split()[3:10] == ["0.40", "0.00", "0.40", "1.18", "0.00", "1.18", "+0.78"]
    assert line.rstrip().endswith(BANDWIDTH)
    assert says_where(section).endswith("1.41 of 1.46 ms exposed; predicted were 0.45 of 0.50 ms")
    lines = list(constants(section))
    assert lines[0].startswith(
        "link ep: latency 10 us (10 in the profile); 0.333 GB/s (1 in the profile)"
    )
    assert any("takes 1.20 (1.10 to 1.30) times as long as equal compute alone" in x for x in lines)
    assert any("1200.0 ms under the profiler" in x for x in lines)
    assert "gloo runs collectives on threads" in lines[-1]


def test_a_job_in_which_nothing_was_rewritten_fails(tmp_path):
    section = judged(tmp_path, found(nothing="no region"))
    assert "no region" in section["failures"][0]["why"]


def test_traces_in_which_no_collective_is_found_fail_and_say_why(tmp_path):
    section = judged(tmp_path, found())
    assert "2 runs in the trace" in section["failures"][0]["why"]
    assert section["warnings"] == ["rank 0: 2 runs in the trace, and 1 ran"]
