"""The search for a culprit: by made-up trials, by a command, and what it says."""

import itertools
import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from moe_compile.check.bisection import GOOD, NO_PASS, bisect_command
from moe_compile.check.culprit import in_order, sentences
from moe_compile.check.forms import AS_ASKED, AS_WRITTEN, NODE_BY_NODE, Forms, without_passes
from moe_compile.check.same import Trials, verdict_of
from moe_compile.check.search import find_culprit, first_wrong, said_of
from moe_compile.check.sections import Record
from moe_compile.check.slower import NOT_SLOWER, TimedTrials, judge_times, search_by_times
from moe_compile.check.team import RESTART
from moe_compile.cli import main
from moe_compile.config import MegaMoEConfig

NAMES = tuple("abcdefghijklmnop")


def search(is_wrong, needs=()):
    """Search among `NAMES`; `needs` has pairs of a name and one that it needs."""
    trials = []

    def is_right(left_out):
        trials.append(left_out)
        kept = [name for name in NAMES if name not in left_out]
        for name, needed in needs:
            if needed not in kept and name in kept:
                kept.remove(name)
        return not is_wrong({*kept})

    return find_culprit(NAMES, is_right), trials


@pytest.mark.parametrize("name", NAMES)
def test_one_culprit_is_found_in_a_few_trials(name):
    found, trials = search(lambda kept: name in kept)
    place = NAMES.index(name)
    assert found.names == (name,) and found.wrong_from == name
    assert found.right_up_to == ("" if place == 0 else NAMES[place - 1])
    assert len(trials) <= 6 and len({*trials}) == len(trials)


@pytest.mark.parametrize("pair", list(itertools.combinations("abhop", 2)))
def test_of_two_that_are_wrong_together_the_later_is_named_and_of_two_that_are_wrong_both(pair):
    together, _ = search(lambda kept: kept.issuperset(pair))
    assert together.names == pair[1:]
    each, _ = search(lambda kept: not kept.isdisjoint(pair))
    assert each.names == pair and each.wrong_from == pair[0]


def test_of_a_culprit_and_what_needs_it_the_culprit_is_named_and_not_what_it_needs():
    needs = [("h", "c"), ("m", "h")]
    assert search(lambda kept: "c" in kept, needs)[0].names == ("c",)
    assert search(lambda kept: "h" in kept, needs)[0].names == ("h",)


def test_where_it_is_none_of_them_one_trial_is_made():
    found, trials = search(lambda kept: True)
    assert found is None and trials == [frozenset(NAMES)]


def test_a_name_that_is_wrong_for_lack_of_a_later_one_is_not_named():
    """With a alone values are wrong, as c mends it; so a came out first."""
    found, _ = search(lambda kept: "p" in kept or ("a" in kept and "c" not in kept))
    assert (found.names, found.right_up_to, found.wrong_from) == (("p",), "o", "p")


@pytest.mark.parametrize(
    ("left_out", "wanted"),
    [
        ("abcd", "without passes"),
        ("d", "without d"),
        ("ac", "without a, c"),
        ("cd", "with passes up to b"),
        ("acd", "with passes up to b without a"),
        ("ad", "with passes up to c without a"),
    ],
)
def test_a_choice_has_few_words_of_its_own(left_out, wanted):
    assert said_of("abcd", left_out) == wanted
    choices = [c for n in range(1, 5) for c in itertools.combinations("abcd", n)]
    assert len({said_of("abcd", choice) for choice in choices}) == len(choices)


@pytest.mark.parametrize("number", [1, 2, 7])
def test_the_first_that_is_wrong_is_found_by_halving(number):
    for first in range(1, number + 1):
        assert first_wrong(number, lambda k, first=first: k < first) == first


def test_trials_go_in_the_order_of_the_pipeline_needed_passes_first_and_checks_never():
    names = ["pin_order", "schedule_exchanges", "save_overwritten", "detect_regions"]
    assert in_order([*names, "verify_schedule"]) == [
        "save_overwritten", "detect_regions", "schedule_exchanges", "pin_order",
    ]  # fmt: skip
    assert "rewrite_regions" in in_order([]) and "verify_schedule" not in in_order([])


def test_a_form_without_passes_leaves_out_those_of_the_job_too():
    config = MegaMoEConfig(disable_passes=("pin_order",))
    form = without_passes(NODE_BY_NODE, config, ["fuse_token_sums"], "without fuse_token_sums")
    assert form.options["megamoe.disable_passes"] == ("pin_order", "fuse_token_sums")
    assert form.options["megamoe.codegen"] == "fx" and form.code != NODE_BY_NODE.code


def test_a_form_runs_in_its_blocks_and_the_others_run_as_written():
    made, forms = [], Forms()
    backend = replace(AS_ASKED, backend=lambda gm, inputs: made.append(gm) or gm.forward)
    switches = [forms.switch(lambda x, n=n: x + n, {}, None) for n in range(3)]
    with forms.using(replace(backend, name="block 2", blocks=frozenset({1}))):
        assert [run(5) for run in switches] == [5, 6, 7]
    assert backend.code == replace(backend, name="other", blocks=frozenset({0})).code
    assert AS_WRITTEN.code != backend.code


def test_a_form_that_was_not_ended_or_raised_is_wrong_and_one_that_was_not_run_is_open(tmp_path):
    path = tmp_path / "culprit.json"
    record = Record(path=path, deadline=time.monotonic() + 9)
    assert record.begin("megamoe") and verdict_of(AS_ASKED, record) == "open"
    again = Record(path=path, deadline=time.monotonic() + 9, resumes=True)
    assert verdict_of(AS_ASKED, again) == "wrong" == verdict_of(AS_ASKED, again)
    (row,) = again.data["tried"]
    assert row["form"] == "megamoe" and "its processes ended" in row["found"]
    again.add_row({"form": "as written", "holds": True})
    assert verdict_of(AS_WRITTEN, again) == "holds"


@pytest.mark.parametrize(("ours", "is_right"), [(1.1, False), (1.0, True), (0.9, True)])
def test_a_form_is_slow_where_its_whole_interval_is_above_inductors(tmp_path, ours, is_right):
    record = Record(path=tmp_path / "culprit.json", deadline=time.monotonic() + 9)
    noise = (1.0, 1.01, 0.99, 1.02, 0.98)
    found = {
        "ours": [ours * one for one in noise], "theirs": [*reversed(noise)],
        "passes": ("pin_order", "a"), "places": ("moe.py:3",),
    }  # fmt: skip
    judge_times(AS_ASKED, record, [found, {**found, "passes": ("b",)}])
    (row,) = record.data["tried"]
    assert (row["holds"], row["passes"]) == (is_right, ["a", "b", "pin_order"])
    assert verdict_of(AS_ASKED, record) == ("holds" if is_right else "wrong")
    assert "times as long as by Inductor" in row["found"] and not record.data["failures"]


class Alone:
    """A team of one rank, and a job of which each form takes its time."""

    def __init__(self, path):
        self.record, self.is_first = Record(path=path, deadline=time.monotonic() + 9), True

    def run(self, what, work, judge, *, needs_s=0.0):
        if self.record.begin(what, needs_s=needs_s):
            judge(self.record, [work()])
            self.record.end(what)

    def tell(self, what, value=None):
        return value


@pytest.mark.parametrize("culprit", ["schedule_exchanges", ""])
def test_the_pass_by_which_steps_are_slow_is_named(tmp_path, culprit):
    class Timed(TimedTrials):
        def _timed(self, form):
            is_slow = culprit and culprit not in form.options.get("megamoe.disable_passes", ())
            passes = ("detect_regions", "rewrite_regions", "schedule_exchanges", "pin_order")
            ours = [1.2 if is_slow else 0.9] * 3
            return {"ours": ours, "theirs": [1.0] * 3, "passes": passes, "places": ()}

    team = Alone(tmp_path / "culprit.json")
    trials = Timed(Trials(team, None, MegaMoEConfig(), 1), 3)
    search_by_times(trials)
    found = team.record.data["culprit"]
    if culprit:
        assert found["names"] == (culprit,) and found["right_up_to"] == "rewrite_regions"
        assert (
            "a step takes 1.200 (1.200 to 1.200) times as long as by Inductor"
            in sentences(found)[1]
        )
    else:
        assert found == {"why": NOT_SLOWER}


HANGS = """
import time
from moe_compile.check.same import ended_after
with ended_after(9.0, "fast"): pass
with ended_after(0.1, "slow"): time.sleep(60)
"""


def test_processes_of_a_form_that_takes_too_long_are_ended_so_that_new_ones_go_on():
    run = subprocess.run(
        [sys.executable, "-c", HANGS], check=False, timeout=50, capture_output=True, text=True
    )
    assert run.returncode == RESTART and "slow did not end in 0 s" in run.stdout


COMMAND = """
import json, os, sys, time
left_out = os.environ["MEGAMOE_DISABLE_PASSES"].split(",")
passes = ["detect_regions", "rewrite_regions", "fold_row_moves", "pin_order"]
report = {{"passes": [{{"pass": name, "applied": ["x"]}} for name in passes]}}
open(os.environ["MEGAMOE_REPORT"], "w").write(json.dumps(report))
if {condition}: {bad}
"""


def bisected(folder, condition, bad="sys.exit(3)", limit_s=60.0):
    command = [sys.executable, "-c", COMMAND.format(condition=condition, bad=bad)]
    status = bisect_command(command, folder, limit_s)
    return status, json.loads((folder / "summary.json").read_text())


def test_a_command_is_run_without_passes_until_the_culprit_is_known(tmp_path, capsys):
    status, summary = bisected(tmp_path, "'fold_row_moves' not in left_out")
    assert status == 0 and summary["culprit"]["names"] == ["fold_row_moves"]
    assert [row["trial"] for row in summary["tried"]] == [
        "as it is", "without passes", "with passes up to rewrite_regions", "without pin_order",
        "without fold_row_moves",
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "right with passes up to rewrite_regions, and wrong from fold_row_moves on" in said
    assert "to run without the culprit: MEGAMOE_DISABLE_PASSES=fold_row_moves" in said


def test_a_command_that_does_not_end_is_bad(tmp_path):
    status, summary = bisected(
        tmp_path, "'pin_order' not in left_out", "time.sleep(600)", limit_s=2.0
    )
    assert status == 0 and summary["culprit"]["names"] == ["pin_order"]
    assert "it did not end" in summary["tried"][0]["found"]


@pytest.mark.parametrize(("condition", "why"), [("False", GOOD), ("True", NO_PASS)])
def test_a_command_in_which_no_pass_is_at_fault_names_none(tmp_path, condition, why, capsys):
    status, summary = bisected(tmp_path, condition)
    assert status == 1 and summary["culprit"] == {"why": why}
    assert f"no culprit is named: {why}" in " ".join(capsys.readouterr().out.split())


def test_passes_left_out_before_stay_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEGAMOE_DISABLE_PASSES", "split_addends")
    condition = "not {'split_addends', 'fold_row_moves'}.issubset(left_out)"
    assert bisected(tmp_path, condition)[0] == 0
    assert "MEGAMOE_DISABLE_PASSES=split_addends,fold_row_moves" in capsys.readouterr().out


def test_blocks_that_are_wrong_together_alone_are_said():
    found = {
        "names": ["a", "b"], "right_up_to": "", "wrong_from": "a", "block": 3, "is_alone": False,
        "left_out_before": ["c"], "tensor": "the first tensor that differs is x",
    }  # fmt: skip
    assert sentences(found) == [
        "values are right without passes, and wrong from a on",
        "culprit: passes a, b, in blocks 1 to 3 together; the first tensor that differs is x",
        "to run without the culprit: --megamoe.disable_passes c,a,b",
    ]
    assert sentences({}) == []


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], "write either the path of a job, or -- and"),
        (["job.toml", "--", "python"], "write either the path of a job"),
        (["--training.steps=3", "--", "python"], "write '--training.steps=3' after --"),
        (["--slow", "--", "python"], "--slow works for torchtitan jobs"),
        (["deepseek_v3_debug_cpu", "--slow", "--megamoe.codegen=fx"], "leave one of the two out"),
    ],
)
def test_what_is_wrong_is_said(words, wanted, capsys):
    assert main(["bisect", *words]) == 2 and wanted in capsys.readouterr().err
