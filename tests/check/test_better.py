"""Other options raced for the fastest, and options written into a job's file."""

import time
import tomllib

import pytest

from moe_compile.check.better import Race, is_possible, result, ways
from moe_compile.check.faster import plan_of
from moe_compile.check.forms import AS_ASKED, Form
from moe_compile.check.sections import Record
from moe_compile.config import MegaMoEConfig
from moe_compile.errors import InvalidConfig
from torchtitan_integration.check.toml_table import with_options


@pytest.fixture
def record(tmp_path):
    return Record(path=tmp_path / "better.json", deadline=time.monotonic() + 9)


def test_ways_are_those_that_numerics_allows_and_not_the_jobs_own():
    exact = ways(MegaMoEConfig(chunks=2))
    assert "chunks = 4" in exact and "chunks = 2" not in exact
    assert not {"batch_parts = 2"} & {*exact}
    bounded, lossy = (ways(MegaMoEConfig(numerics=n)) for n in ("bounded", "lossy"))
    assert "batch_parts = 2" in bounded and 'chunks = 2, chunk_by = "tokens"' in bounded
    fp8 = 'dispatch_wire = "fp8", combine_wire = "fp8"'
    assert fp8 in lossy and fp8 not in bounded
    assert exact["chunks = 4"].options == {"megamoe.chunks": 4}


def test_there_are_no_more_chunks_of_experts_than_experts():
    found = ways(MegaMoEConfig(numerics="bounded"))
    left = {name for name, form in found.items() if not is_possible(form, 2)}
    assert left == {"chunks = 4", "chunks = 8", 'chunks = 4, chunk_edges = "load"'}
    assert all(is_possible(form, 8) for form in found.values())


def first(plan, seconds=1.0):
    return [{"first_s": seconds, "plan": plan, "experts": 4}] * 2


def race_of(record, **plans):
    race = Race()
    for name, plan in plans.items():
        form = AS_ASKED if name == "megamoe" else Form(name=name)
        race.judge_first(form, record, first(plan))
    return race


def test_ways_that_do_the_same_are_raced_once(record):
    race = race_of(record, megamoe=[2], four=[4], eight=[4])
    assert [*race.plans] == ["megamoe", "four"]
    assert record.data["skipped"][0]["why"] == "does what is done by: four"


def times(**seconds):
    return [{name: [s, s * 1.01, s * 0.99] for name, s in seconds.items()}]


def test_the_slower_half_leaves_and_the_job_as_asked_stays(record):
    race = race_of(record, megamoe=[2], a=[1], b=[3], c=[4])
    race.judge_rounds(3, record, times(megamoe=9.0, a=3.0, b=1.0, c=2.0))
    assert [*race.plans] == ["megamoe", "b", "c"]
    race.judge_rounds(6, record, times(megamoe=9.0, b=2.0, c=1.0))
    assert [*race.plans] == ["megamoe", "c"]
    rows = record.data["rows"]
    assert [row["form"] for row in rows if not row["goes_on"]] == ["a", "b"]
    assert rows[-2]["ratio"]["median"] == pytest.approx(1 / 9)


FORMS = {"chunks = 4": Form(name="chunks = 4", options={"megamoe.chunks": 4})}


def row(rounds, median, high):
    ratio = {"median": median, "low": 0.5, "high": high}
    return {"form": "chunks = 4", "rounds": rounds, "step_s": median, "ratio": ratio}


@pytest.mark.parametrize(("high", "is_faster"), [(0.99, True), (1.01, False)])
def test_the_last_race_decides_and_its_interval_says_whether_it_is_faster(high, is_faster):
    asked = {**row(24, 1.0, 1.0), "form": "megamoe"}
    found = result([row(3, 0.1, 0.1), asked, row(24, 0.9, high)], FORMS)
    assert found == {
        "won": {"chunks": 4},
        "ratio": {"median": 0.9, "low": 0.5, "high": high},
        "is_faster": is_faster,
    }
    assert result([asked], FORMS) == {}


REGION = {"num_chunks": 2, "chunk_edges": "even", "dispatch": "all_to_all", "nodes": "off",
          "hop_slices": 1, "wires": {}, "remarks": ()}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"regions": [{**REGION, "num_chunks": 4}]},
        {"regions": [{**REGION, "wires": {"dispatch": ("fp8", 8, 4)}}]},
        {"regions": [REGION, REGION]},
        {"attention": [{"num_chunks": 2}]},
        {"passes": [{"pass": "split_batch", "applied": ["2 parts"]}]},
    ],
)
def test_another_way_has_another_plan(change):
    report = {"regions": [REGION], "attention": [], "passes": []}
    assert plan_of(report) == plan_of({**report, "regions": [dict(REGION)]})
    assert plan_of({**report, **change}) != plan_of(report)


TEXT = """# a job
[model]
chunks = 9  # not this one

[megamoe]  # ours
chunks = 2      # as measured
recompute = "model"
report = "a.json"

[training]
steps = 3
"""


def test_options_are_written_into_their_table_and_all_else_stays():
    changed = with_options(TEXT, "megamoe", {"chunks": 4, "chunk_by": "tokens", "recompute": "x"})
    assert "chunks = 4      # as measured" in changed and 'chunk_by = "tokens"\n' in changed
    table = tomllib.loads(changed)
    assert table["megamoe"] == {
        "chunks": 4, "chunk_by": "tokens", "recompute": "x", "report": "a.json",
    }  # fmt: skip
    assert table["model"] == {"chunks": 9} and table["training"] == {"steps": 3}
    untouched = {*TEXT.splitlines()} - {*changed.splitlines()}
    assert untouched == {"chunks = 2      # as measured", 'recompute = "model"'}


def test_a_table_that_is_not_there_is_added_and_one_in_another_form_is_refused():
    assert tomllib.loads(with_options("[a]\nb = 1\n", "megamoe", {"chunks": 4}))["megamoe"] == {
        "chunks": 4
    }
    with pytest.raises(InvalidConfig, match=r"write into it: chunks = 4"):
        with_options("megamoe = { chunks = 2 }\n", "megamoe", {"chunks": 4})
