"""The search for a culprit: by made-up trials, by a command, and what it says."""

import itertools
import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from moe_compile.check.bisection import GOOD, NO_PASS, bisect_command
from moe_compile.check.culprit import (
    NOT_BY_REGION,
    OUT_OF_TIME_LATER,
    OUTSIDE,
    RIGHT_THERE,
    check_culprit,
    find_regions,
    in_order,
    sentences,
)
from moe_compile.check.forms import (
    AS_ASKED,
    AS_WRITTEN,
    MANY,
    NODE_BY_NODE,
    Forms,
    without_passes,
)
from moe_compile.check.same import OutOfTime, Trials, verdict_of
from moe_compile.check.script import ScriptSteps, given_by
from moe_compile.check.search import find_culprit, first_wrong, said_of
from moe_compile.check.sections import Record
from moe_compile.check.slower import NOT_SLOWER, TimedTrials, judge_times, search_by_times
from moe_compile.check.team import RESTART
from moe_compile.cli import main
from moe_compile.config import MegaMoEConfig
from moe_compile.testing.rank_pool import forget_compiled
from passes.kinds.by_counts.kind import ByCounts
from tests.layers import GroupedExperts
from tests.slow_parameters import slow_but

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
        "passes": ("pin_order", "a"), "places": (("region 0", "moe.py:3"),),
    }  # fmt: skip
    judge_times(AS_ASKED, record, [found, {**found, "passes": ("b",)}])
    (row,) = record.data["tried"]
    assert (row["holds"], row["passes"]) == (is_right, ["a", "b", "pin_order"])
    assert verdict_of(AS_ASKED, record) == ("holds" if is_right else "wrong")
    assert "times as long as by Inductor" in row["found"] and not record.data["failures"]


class Alone:
    """A team of one rank, which has `seconds`."""

    def __init__(self, path, seconds=9):
        self.record, self.is_first = Record(path=path, deadline=time.monotonic() + seconds), True

    def run(self, what, work, judge, *, needs_s=0.0):
        if self.record.begin(what, needs_s=needs_s):
            try:
                judge(self.record, [work()])
            except TimeoutError as error:
                self.record.fail(what, str(error))
            self.record.end(what)

    def tell(self, what, value=None):
        return value


AT = (("region 0", "moe.py:3 in forward"), ("region 1", "moe.py:9 in forward"))


def searched(path, culprit, time_left=lambda form: True, is_hung=False):
    """Search by times; `culprit` is an entry of `disable_passes`, of a pass or of a region too."""

    class Timed(TimedTrials):
        def _timed(self, form):
            if not time_left(form):
                raise OutOfTime(form.name)
            left_out = {*form.options.get("megamoe.disable_passes", ())}
            is_slow = culprit and left_out.isdisjoint({culprit, culprit.partition(":")[0]})
            if is_slow and is_hung:
                raise TimeoutError("it did not end")
            passes = ("detect_regions", "rewrite_regions", "schedule_exchanges", "pin_order")
            ours = [1.2 if is_slow else 0.9] * 3
            return {"ours": ours, "theirs": [1.0] * 3, "passes": passes, "places": AT}

    team = Alone(path)
    search_by_times(Timed(Trials(team, None, MegaMoEConfig(), 1), 3))
    return team.record.data


@pytest.mark.parametrize("culprit", ["schedule_exchanges", ""])
def test_the_pass_by_which_steps_are_slow_is_named(tmp_path, culprit):
    found = searched(tmp_path / "culprit.json", culprit)["culprit"]
    if culprit:
        assert found["names"] == (culprit,) and found["right_up_to"] == "rewrite_regions"
        _, said, without, last = sentences(found)
        assert "a step takes 1.200 (1.200 to 1.200) times as long as by Inductor" in said
        assert without.endswith(" schedule_exchanges")
        assert last == f"no region is named: {NOT_BY_REGION.format(culprit)}"
    else:
        assert found == {"why": NOT_SLOWER}


@pytest.mark.parametrize("is_hung", [False, True])
def test_the_region_by_which_steps_are_slow_or_do_not_end_is_named_too(tmp_path, is_hung):
    data = searched(tmp_path / "culprit.json", "rewrite_regions:region 1", is_hung=is_hung)
    assert data["culprit"]["regions"] == {"rewrite_regions": ["region 1"]}
    assert [row["form"] for row in data["tried"]][-2:] == [
        "megamoe, rewrite_regions without regions", "megamoe, rewrite_regions without region 1",
    ]  # fmt: skip
    _, said, without = sentences(data["culprit"])
    assert "culprit: pass rewrite_regions, in region 1 (moe.py:9 in forward); " in said
    assert without.endswith(" --megamoe.disable_passes 'rewrite_regions:region 1'")


def test_a_region_is_sought_as_long_as_there_is_time_and_the_pass_is_named_without(tmp_path):
    def time_left(form):
        return not any(":" in one for one in form.options.get("megamoe.disable_passes", ()))

    found = searched(tmp_path / "culprit.json", "rewrite_regions:region 1", time_left)["culprit"]
    assert found["names"] == ("rewrite_regions",)
    assert sentences(found)[-1] == f"no region is named: {OUT_OF_TIME_LATER}"


def regions_of(passes, is_wrong, regions=("0", "1", "2")):
    """Search among regions; `is_wrong` is given the pairs of pass and region that are rewritten."""

    def is_right(left_out, said):
        pairs = {(p, r) for p in passes for r in regions}
        pairs -= {(p, r) for p, r in pairs if p in left_out or f"{p}:{r}" in left_out}
        words.append(said)
        return not is_wrong(pairs)

    words = []
    return find_regions(passes, regions, is_right), words


REWRITES, QUANTIZES = "rewrite_regions", "quantize_exchanges"


def test_every_region_in_which_a_pass_is_wrong_is_named():
    pairs = {(REWRITES, "0"), (REWRITES, "2")}
    found, words = regions_of([REWRITES], lambda there: there & pairs)
    assert found == {"regions": {REWRITES: ["0", "2"]}} and len(words) == len({*words}) <= 6
    one, words = regions_of([REWRITES], lambda there: True, regions=("0",))
    assert one == {"regions": {REWRITES: ["0"]}} and not words


def test_of_two_passes_each_has_its_region():
    pairs = {(REWRITES, "2"), (QUANTIZES, "0")}
    found, words = regions_of([REWRITES, QUANTIZES], lambda there: there & pairs)
    assert found == {"regions": {REWRITES: ["2"], QUANTIZES: ["0"]}}
    assert words[0] == f"without {QUANTIZES}, {REWRITES} in all regions"
    culprit = {
        "names": [REWRITES, QUANTIZES], "right_up_to": "", "wrong_from": REWRITES, **found,
        "places": [["0", "a.py:1"], ["2", "a.py:2"], ["2", "b.py:3"]],
    }  # fmt: skip
    assert sentences(culprit)[1:] == [
        f"culprit: passes {REWRITES}, {QUANTIZES}, {REWRITES} in 2 (a.py:2; b.py:3); "
        f"{QUANTIZES} in 0 (a.py:1)",
        f"to run without the culprit: --megamoe.disable_passes {REWRITES}:2,{QUANTIZES}:0",
    ]


def test_a_pass_that_is_at_fault_in_no_region_is_left_out_whole():
    outside, _ = regions_of([REWRITES], lambda there: True)
    assert outside == {"regions": {}, "no_region": OUTSIDE.format(REWRITES)}
    found, _ = regions_of([REWRITES, QUANTIZES], lambda there: (REWRITES, "1") in there)
    assert found == {"regions": {REWRITES: ["1"]}, "no_region": RIGHT_THERE.format(QUANTIZES)}
    culprit = {
        "names": [REWRITES, QUANTIZES], "right_up_to": "", "wrong_from": REWRITES, **found,
    }  # fmt: skip
    said = sentences(culprit)
    assert said[-1] == f"no more regions are named: {RIGHT_THERE.format(QUANTIZES)}"
    assert said[-2].endswith(f" {REWRITES}:1,{QUANTIZES}")


def two_blocks():
    """Return a step of two blocks, the second of two MoE layers, on one rank."""
    torch.manual_seed(0)
    layers = [GroupedExperts(16, 32, 4, 2, dist.group.WORLD) for _ in range(3)]
    blocks = [layers[0], torch.nn.Sequential(*layers[1:])]
    model = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(16, 16, dtype=torch.bfloat16)

    def step(number):
        optimizer.zero_grad()
        loss = model(batch + number).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return {"model": model, "blocks": blocks, "optimizer": optimizer, "step": step}


@pytest.fixture
def one_rank(no_group_stays):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


@pytest.mark.slow
def test_the_region_of_a_block_is_named_in_which_a_rewrite_is_wrong(
    tmp_path, monkeypatch, one_rank
):
    """The second of two MoE layers in the second of two blocks."""
    emit = ByCounts.emit

    def wrong(self, one, state):
        emitted = emit(self, one, state)
        region = one.found.region
        if region.name == "region 1":
            result = emitted.instead[region.result]
            with result.graph.inserting_after(result):
                larger = result.graph.call_function(torch.mul, (result, 1.0 + 2.0**-7))
            larger.meta.update(result.meta)
            return replace(emitted, instead={**emitted.instead, region.result: larger})
        return emitted

    monkeypatch.setattr(ByCounts, "emit", wrong)
    forget_compiled()
    job = ScriptSteps(given_by(two_blocks()), {"codegen": "fx", "disable_passes": ("pin_order",)})
    team = Alone(tmp_path / "culprit.json", seconds=900)
    with torch._dynamo.config.patch(recompile_limit=MANY, accumulated_recompile_limit=MANY):
        check_culprit(Trials(team, job, job.config, 1))
    found = team.record.data["culprit"]
    assert (found["names"], found["block"], found["is_alone"]) == (("rewrite_regions",), 2, True)
    assert found["regions"] == {"rewrite_regions": ["region 1"]}
    _, said, without = sentences(found)
    assert "culprit: pass rewrite_regions, in block 2, in region 1 (layers.py:" in said
    assert without == (
        "to run without the culprit: --megamoe.disable_passes 'pin_order,rewrite_regions:region 1'"
    )


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
    assert run.returncode == RESTART and "slow did not end within 0 s" in run.stdout


COMMAND = """
import json, os, sys, time
left_out = os.environ["MEGAMOE_DISABLE_PASSES"].split(",")
passes = ["detect_regions", "rewrite_regions", "fold_row_moves", "pin_order"]
regions = [{{"name": f"region {{n}}", "where": f"moe.py:{{n}} in forward"}} for n in range(2)]
report = {{"passes": [{{"pass": name, "applied": ["x"]}} for name in passes]}}
report |= {{"regions": regions, "attention": []}}
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
    last = said.splitlines()[-1]
    assert last == f"no region is named: {NOT_BY_REGION.format('fold_row_moves')}"


@pytest.mark.parametrize("number", slow_but([1], [0, 1]))
def test_a_command_that_does_not_end_is_bad_and_the_region_is_named(tmp_path, number, capsys):
    region = f"region {number}"
    name = f"rewrite_regions:{region}"
    condition = f"not {{*left_out}} & {{'{name}', 'rewrite_regions'}}"
    status, summary = bisected(tmp_path, condition, "time.sleep(600)", limit_s=2.0)
    assert status == 0 and summary["culprit"]["names"] == ["rewrite_regions"]
    assert "it did not end" in summary["tried"][0]["found"]
    assert summary["culprit"]["regions"] == {"rewrite_regions": [region]}
    said = capsys.readouterr().out
    assert f"MEGAMOE_DISABLE_PASSES='{name}'" in said and "(moe.py:" in said


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
        "places": [["region 0", "moe.py:3"], ["region 1", "moe.py:3"]],
    }  # fmt: skip
    assert sentences(found) == [
        "values are right without passes, and wrong from a on",
        "culprit: passes a, b, in blocks 1 to 3 together (regions at moe.py:3); the first tensor "
        "that differs is x",
        "to run without the culprit: --megamoe.disable_passes c,a,b",
    ]
    assert sentences({}) == []


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], "write either the path of a job"),
        (["job.toml", "--", "python"], "write either the path of a job"),
        (["--training.steps=3", "--", "python"], "'--training.steps=3' is a flag of torchtitan"),
        (["--slow", "--", "python"], "--slow works for torchtitan jobs"),
        (["deepseek_v3_debug_cpu", "--slow", "--megamoe.codegen=fx"], "leave one of the two out"),
    ],
)
def test_what_is_wrong_is_said(words, wanted, capsys):
    assert main(["bisect", *words]) == 2 and wanted in capsys.readouterr().err
