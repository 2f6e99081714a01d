"""What `better` picks on the emulated device and link, beside the fastest of all ways tried."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.fx as fx

from benchmarks.link.cases import Case
from benchmarks.link.charged_graph import as_estimated
from benchmarks.link.link_model import LinkRate, Topology
from benchmarks.planner import raced_ways
from benchmarks.planner.prediction import run_settings
from benchmarks.planner.prediction_settings import Setting
from benchmarks.planner.raced_layer import AS_ASKED, RacedLayer, rate_of
from benchmarks.planner.raced_settings import (
    ERROR,
    NODES,
    SETTINGS,
    DrawnErrors,
    Raced,
    every_way,
)
from benchmarks.planner.raced_ways import Charged, Row, Trials, race_in, run, searched, summary
from moe_compile.check.better import form_of
from moe_compile.check.candidates import freed, over
from moe_compile.check.forms import AS_ASKED as ASKED
from moe_compile.hardware import load_profile

RACED = SETTINGS[0]
RESULTS = Path("benchmarks/results/raced_ways_cpu.json")
BAR = 0.02
"""Of the fastest way's time: at most so much slower is what `better` picks."""
FLAT = {"chunk_by": "experts", "dispatch": "all_to_all", "nodes": "off"}
SAME = {"dispatch_wire": "same", "combine_wire": "same"}


@pytest.mark.parametrize("raced", SETTINGS, ids=lambda raced: raced.name)
def test_ways_are_options_that_may_be_set_each_once(raced):
    told = [over(AS_ASKED, options) for options in every_way(raced.case)]
    names = [form_of(options).name for options in told]
    assert len(names) == len({*names}) >= 23 and ASKED.name in names
    for options in told:
        replace(AS_ASKED, **options)
    assert any("nodes" in options for options in told) is (raced.case is NODES)


@pytest.fixture(autouse=True)
def few_races(monkeypatch):
    monkeypatch.setattr(raced_ways, "NOISY_RACES", 2)


def node_of(operator):
    return fx.Graph().call_function(operator)


def test_errors_are_drawn_once_for_a_kind_of_operator_of_about_one_size():
    drawn, mm = DrawnErrors("a"), node_of(torch.ops.aten.mm.default)
    factors = {drawn.price(mm, us) / us for us in (9.0, 10.0, 15.0)}
    assert max(factors) == pytest.approx(min(factors))
    others = {
        drawn.price(mm, 99.0) / 99.0,
        drawn.price(node_of(torch.ops.aten.add.Tensor), 9.0) / 9,
    }
    others |= {DrawnErrors("b").price(mm, 9.0) / 9.0}
    assert len({round(one, 9) for one in others | {min(factors)}}) == 4
    assert all(abs(one - 1.0) <= ERROR for one in others | factors)
    assert drawn.price(mm, 0.0) == 0.0
    assert DrawnErrors("a", 0.0).price(mm, 9.0) == 9.0


def test_the_link_is_not_as_it_is_stated_and_the_same_whenever_it_is_drawn():
    stated = LinkRate(latency_s=1.0, bytes_per_s=2.0, inside_latency_s=3.0, inside_bytes_per_s=4.0)
    link = DrawnErrors("a").link(stated)
    assert link == DrawnErrors("a").link(stated) != stated
    assert 0.8 <= link.latency_s <= 1.2 and 3.2 <= link.inside_bytes_per_s <= 4.8


def trials_of(times, predicted, folder):
    """Return trials that are all known; times and predictions by number of chunks."""
    ranked = [
        {"options": {"chunks": n, **FLAT, **SAME}, "predicted_us": us}
        for n, us in predicted.items()
    ]
    found = {"ranked": [ranked], "as_it_is_us": [predicted[1]], "experts": [16]}
    profile = load_profile("cpu").as_toml()
    known = {"profile": profile, "candidates": found, "ways": {}}
    slow = {"us": 99.0, "seconds": 99.0, "error": 0.0}
    config = replace(AS_ASKED, chunks=1)
    more = [*every_way(RACED.case), freed(config)]
    parts = [{**freed(config), "batch_parts": p, "chunks": c} for p in (2, 4) for c in ("auto", 1)]
    load = [{"chunks": number, "chunk_edges": "load"} for number in (2, 4)]
    for place, options in enumerate([*more, *parts, *load]):
        told = over(config, options)
        known["ways"][form_of(told).name] = {**slow, "plan": [place]}
    for number, seconds in times.items():
        name = form_of(over(config, {"chunks": number})).name
        found = {"us": predicted[number], "seconds": seconds, "error": 0.0, "plan": ["n", number]}
        known["ways"][name] = found

    def layer_of(_):
        raise AssertionError("a trial is asked for that is known")

    return Trials(RACED, known, layer_of, lambda: None, folder)


def test_the_fastest_of_the_raced_is_picked_though_prediction_has_another(tmp_path):
    trials = trials_of({1: 9.0, 2: 5.0, 4: 4.0}, {1: 9.0, 2: 3.0, 4: 3.5}, tmp_path)
    row = race_in(RACED, trials)
    assert (row.picked, row.best, row.loss) == ("chunks = 4", "chunks = 4", 0.0)
    assert row.predicted_best_ms == 5000.0 and row.as_asked_ms == 9000.0
    assert row.noisy_losses and {*row.noisy_losses} == {0.0}
    assert row.num_raced == row.num_predicted == 9 < row.num_tried


def test_a_loss_is_against_ways_that_the_search_does_not_list(tmp_path):
    trials = trials_of({1: 9.0, 2: 5.0, 4: 4.0}, {1: 9.0, 2: 3.0, 4: 3.5}, tmp_path)
    fast = over(trials.config, {"chunks": 4, "chunk_by": "tokens", "combine_wire": "fp8"})
    trials._known["ways"][form_of(fast).name]["seconds"] = 3.2
    row = race_in(RACED, trials)
    assert row.best == form_of(fast).name and row.picked == "chunks = 4"
    assert row.loss == pytest.approx(0.25)


def test_nothing_is_picked_where_the_job_as_asked_is_fastest(tmp_path):
    trials = trials_of({1: 3.0, 2: 5.0, 4: 4.0}, {1: 9.0, 2: 3.0, 4: 3.5}, tmp_path)
    row = race_in(RACED, trials)
    assert (row.picked, row.loss) == (ASKED.name, 0.0)


def test_a_search_that_fails_is_no_result(tmp_path):
    trials = trials_of({1: 9.0, 2: 5.0, 4: 4.0}, {1: 9.0, 2: 3.0, 4: 3.5}, tmp_path)
    del trials._known["ways"]["chunks = 4"]
    with pytest.raises(RuntimeError, match="chunks = 4"):
        searched(trials, Charged(trials))


def row(picked_ms, noisy=()):
    times = {"best_ms": 2.0, "auto_ms": 3.0, "predicted_best_ms": 2.5, "as_asked_ms": 4.0}
    counts = {"num_tried": 5, "num_predicted": 4, "num_raced": 3}
    names = {"setting": "x", "picked": "a", "best": "b"}
    return Row(picked_ms=picked_ms, noisy_losses=noisy, **names, **times, **counts)


def test_the_summary_has_the_largest_losses():
    found = summary([row(2.0, (0.0, 0.01)), row(2.2, (0.03, 0.0))])
    assert found["largest_loss"] == pytest.approx(0.1)
    assert found["mean_loss"] == pytest.approx(0.05)
    assert found["largest_loss_of_auto"] == pytest.approx(0.5)
    assert found["largest_loss_by_prediction"] == pytest.approx(0.25)
    assert found["largest_loss_as_asked"] == pytest.approx(1.0)
    assert (found["noisy_races"], found["noisy_within_2_percent"]) == (4, 3)
    assert found["largest_noisy_loss"] == 0.03


@pytest.mark.slow
def test_ranks_that_are_threads_take_the_time_of_ranks_that_are_processes():
    """Charged time is of messages and sizes, so that it is equal to the last digits."""
    case = Case(name="small", num_ranks=2, tokens=256, experts=8, width=128, hidden=128)
    ((*held,),) = run_settings([Setting(case=case, routing="drawn")])
    layer = RacedLayer(case, Topology(num_ranks=2))
    for one in (one for one in held if one.ratio == "1:1"):
        hardware = replace(load_profile("cpu"), link_gb_per_s=one.link_mb_per_s / 1e3)
        programs = layer.compiled({"chunks": one.num_chunks}, AS_ASKED, hardware)
        _, _, seconds = layer.timed(programs, rate_of(hardware), as_estimated)
        assert seconds * 1e3 == pytest.approx(one.measured_ms, rel=1e-6)
    layer.threads.close()


@pytest.mark.slow
def test_a_setting_is_raced_from_the_layer_and_again_from_the_file(tmp_path):
    case = Case(name="small", num_ranks=2, tokens=128, experts=4, width=128, hidden=128)
    raced, known, written = Raced(case=case, device="cpu", ratio="1:1"), {}, []
    (first,) = run([raced], known, lambda: written.append(json.dumps(known)))
    assert first.loss <= first.over_best(first.as_asked_ms) and len(written) > first.num_tried
    again = json.loads(written[-1])
    assert run([raced], again, lambda: pytest.fail("something was tried again")) == [first]


def test_the_results_are_of_ten_settings_and_keep_the_bar():
    found = json.loads(RESULTS.read_text())
    assert found["is_emulated"] and found["command"] and found["machine"]["torch"]
    assert [row["setting"] for row in found["rows"]] == [one.name for one in SETTINGS]
    assert found["summary"]["settings"] == len(SETTINGS) == 10
    for row in found["rows"]:
        tried = found["settings"][row["setting"]]["ways"]
        ms = {name: one["seconds"] * 1e3 for name, one in tried.items()}
        assert row["num_tried"] == len(ms)
        assert row["best_ms"] == min(ms.values()) and row["picked_ms"] == ms[row["picked"]]
        assert row["picked_ms"] / row["best_ms"] - 1.0 <= BAR


def test_the_page_has_the_figures_of_the_results():
    page = " ".join(Path("docs/check.md").read_text().split())
    found = json.loads(RESULTS.read_text())
    summed, rows = found["summary"], found["rows"]
    fewest, most = (bound(row["num_tried"] for row in rows) for bound in (min, max))
    assert f"{fewest} to {most} ways" in page
    assert f"at most {summed['largest_loss']:.1%} slower" in page
    assert f"chooses was {summed['largest_loss_of_auto']:.1%} slower" in page
    assert f"predicted time was {summed['largest_loss_by_prediction']:.1%} slower" in page
    assert f"{summed['noisy_within_2_percent']} of {summed['noisy_races']} races" in page
    assert f"the largest loss is {summed['largest_noisy_loss']:.1%}" in page
