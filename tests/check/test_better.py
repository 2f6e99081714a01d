"""Other options raced for the fastest, and options written into a job's file."""

import time
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_compile.check.better import (
    RACED,
    ROUNDS,
    Race,
    by_prediction,
    check_better,
    form_of,
    judge_prediction,
    predicted_us,
    result,
)
from moe_compile.check.candidates import MOST, found_in, freed, ways
from moe_compile.check.faster import plan_of
from moe_compile.check.forms import AS_ASKED, Form, keep_many_programs
from moe_compile.check.script import ScriptSteps, given_by
from moe_compile.check.sections import Record
from moe_compile.check.summary import SAYS, TABLES
from moe_compile.check.team import Team
from moe_compile.config import MegaMoEConfig
from moe_compile.errors import InvalidConfig
from moe_compile.testing.rank_pool import forget_compiled
from tests.layers import GroupedExperts
from torchtitan_integration.job_file import with_options


@pytest.fixture
def record(tmp_path):
    return Record(path=tmp_path / "better.json", deadline=time.monotonic() + 9)


def candidate(chunks, us, **more):
    flat = {"dispatch": "all_to_all", "nodes": "off", "dispatch_wire": "same"}
    options = {"chunks": chunks, "chunk_by": "experts", **flat, "combine_wire": "same", **more}
    return {"options": options, "predicted_us": us}


def region(*ranked, as_it_is_us=10.0, experts=8):
    decision = {"ranked": list(ranked), "as_it_is_us": as_it_is_us}
    return {"decision": decision, "num_local_experts": experts}


def heads(number, us):
    return {"options": {"attention_chunks": number}, "predicted_us": us}


def found(*regions, attention=()):
    return found_in({"regions": [*regions], "attention": [*attention]})


def test_ways_are_the_planners_candidates_the_fastest_over_all_regions_and_ranks_first():
    """Of 8 chunks one region has no such candidate, and counts as it is: 10."""
    ranks = [
        found(region(candidate(4, 5.0), candidate(8, 1.0), candidate(1, 10.0))),
        found(region(candidate(4, 5.0), candidate(1, 10.0))),
    ]
    said = ways(ranks, MegaMoEConfig(chunks=2))
    assert said[:3] == [{"chunks": 4}, {"chunks": 8}, {"chunks": 1}]
    assert {"chunks": 4, "chunk_edges": "load"} in said
    assert said[-1]["chunks"] == "auto" and said[-1]["nodes"] == "auto"
    assert not any("batch_parts" in one for one in said)


def test_a_way_says_what_differs_from_the_job_and_not_what_the_job_has():
    config = MegaMoEConfig(chunks=4, dispatch="auto", nodes="exact")
    said = ways([found(region(candidate(4, 5.0), candidate(1, 10.0)))], config)
    assert said[0] == {"dispatch": "all_to_all", "nodes": "off"}
    two_hops = candidate(4, 5.0, nodes="exact", hop_slices=2, chunk_by="tokens")
    (first, *_) = ways([found(region(two_hops))], MegaMoEConfig(chunks=4))
    assert first == {"chunk_by": "tokens", "nodes": "exact", "hop_slices": 2}


def test_prices_of_experts_and_of_attention_add_up():
    regions = region(candidate(1, 10.0), candidate(2, 8.0))
    attention = region(heads(1, 5.0), heads(2, 4.5), as_it_is_us=5.0)
    said = ways([found(regions, attention=[attention])], MegaMoEConfig(chunks=8))
    assert said[:4] == [
        {"chunks": 2, "attention_chunks": 2},
        {"chunks": 2},
        {"chunks": 1, "attention_chunks": 2},
        {"chunks": 1},
    ]


def test_the_longest_list_is_cut_at_its_slow_end():
    many = [candidate(1, float(100 - n), dispatch_wire=f"w{n}") for n in range(40)]
    said = ways([found(region(*many, as_it_is_us=100.0))], MegaMoEConfig())
    assert [one["dispatch_wire"] for one in said[:MOST]] == [f"w{39 - n}" for n in range(MOST)]
    assert len(said) == MOST + 1  # the planner's own choice


def test_without_a_price_ways_are_the_numbers_that_numerics_allows():
    report = found({"decision": {}, "num_local_experts": 4})
    exact = ways([report], MegaMoEConfig(chunks=2))
    chunks = [{"chunks": n} for n in (1, 4)]
    assert exact == [*chunks, {"attention_chunks": 2}, {"chunk_edges": "load"}]
    bounded = ways([report], MegaMoEConfig(chunks=2, numerics="bounded"))
    assert {"chunk_by": "tokens"} in bounded and {"batch_parts": 2, "chunks": 1} in bounded
    fp8 = {"dispatch_wire": "fp8", "combine_wire": "fp8"}
    assert fp8 in ways([report], MegaMoEConfig(numerics="lossy")) and fp8 not in bounded


def test_parts_of_the_batch_are_as_the_planner_would_have_them():
    ranked = found(region(candidate(4, 5.0), candidate(1, 10.0)))
    said = ways([ranked], MegaMoEConfig(numerics="lossy", chunks=2))
    parts = [one for one in said if "batch_parts" in one]
    assert [(one["batch_parts"], one["chunks"]) for one in parts] == [
        (2, "auto"), (2, 1), (4, "auto"), (4, 1),
    ]  # fmt: skip
    assert {(one["dispatch_wire"], one["combine_wire"]) for one in parts} == {("auto", "auto")}


def test_the_planner_is_asked_for_all_but_a_number_format_that_the_job_names():
    free = freed(MegaMoEConfig(chunks=2, dispatch_wire="fp8", batch_parts=4))
    assert (free["chunks"], free["nodes"], free["batch_parts"]) == ("auto", "auto", 1)
    assert "dispatch_wire" not in free and free["combine_wire"] == "auto"
    assert (free["chunk_edges"], freed(MegaMoEConfig(routing_skew=1.0))["chunk_edges"]) == (
        "even", "auto",
    )  # fmt: skip


def test_a_form_is_named_as_a_table_has_its_options():
    form = form_of({"chunks": 2, "chunk_by": "tokens"})
    assert form.name == 'chunks = 2, chunk_by = "tokens"'
    assert form.options == {"megamoe.chunks": 2, "megamoe.chunk_by": "tokens"}


def predicted(record, **options_us):
    """Have ways predicted: name of the way -> its options and microseconds; return their forms."""
    forms = {}
    for number, (options, us) in enumerate(options_us.values()):
        form = form_of(options)
        forms[form.name] = form
        judge_prediction(form.name, record, [{"us": us, "plan": [number]}, {"us": 1.0, "plan": []}])
    return forms


def test_ways_that_do_the_same_are_predicted_once_and_the_fastest_are_raced(record):
    many = {f"way {n}": ({"chunks": n} if n else {}, 50.0 - n) for n in range(RACED + 3)}
    forms = predicted(record, **many)
    again = [{"us": 0.0, "plan": [3]}, {"us": 0.0, "plan": []}]
    judge_prediction("again", record, again)
    assert record.data["skipped"][0]["why"] == "it makes the same rewrites as: chunks = 3"
    names = by_prediction(record.data["predicted"], forms)
    assert names == [AS_ASKED.name, *(f"chunks = {RACED + 2 - n}" for n in range(RACED))]
    assert record.data["predicted"]["chunks = 3"]["us"] == 47.0  # of the slowest rank


def test_number_formats_of_one_way_do_not_keep_another_way_from_the_race(record):
    fp8 = {f"fp8 {n}": ({"chunks": 4, "dispatch_wire": f"w{n}"}, 10.0 + n) for n in range(RACED)}
    forms = predicted(record, asked=({}, 99.0), **fp8, other=({"chunks": 2}, 30.0))
    _, first, second, third, *_, last = by_prediction(record.data["predicted"], forms)
    assert (first, second) == ('chunks = 4, dispatch_wire = "w0"', "chunks = 2")
    assert (third, last) == ('chunks = 4, dispatch_wire = "w1"', 'chunks = 4, dispatch_wire = "w6"')


def test_number_formats_of_one_way_do_not_keep_another_way_from_the_list():
    many = [candidate(4, float(n), dispatch_wire=f"w{n}") for n in range(MOST)]
    said = ways([found(region(*many, candidate(2, 50.0), as_it_is_us=99.0))], MegaMoEConfig())
    assert [(one["chunks"], one.get("dispatch_wire")) for one in said[:3]] == [
        (4, "w0"), (2, None), (4, "w1"),
    ]  # fmt: skip


def test_a_prediction_is_the_sum_over_all_scheduled_graphs():
    passes = [{"measures": {"step_us": 3.0}}, {"measures": {"other": 1.0}}, {}]
    assert predicted_us({"passes": [*passes, {"measures": {"step_us": 4.0}}]}) == 7.0


def first(plan, seconds=1.0):
    return [{"first_s": seconds, "plan": plan}] * 2


def race_of(record, **plans):
    race = Race()
    for name, plan in plans.items():
        form = AS_ASKED if name == "megamoe" else Form(name=name)
        race.judge_first(form, record, first(plan))
    return race


def test_ways_that_do_the_same_are_raced_once(record):
    race = race_of(record, megamoe=[2], four=[4], eight=[4])
    assert [*race.plans] == ["megamoe", "four"]
    assert record.data["skipped"][0]["why"] == "it makes the same rewrites as: four"


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


def raced(form, rounds, step_s, goes_on=True):
    ratio = {"median": step_s, "low": step_s, "high": step_s}
    return {"form": form, "rounds": rounds, "step_s": step_s, "ratio": ratio, "goes_on": goes_on}


def test_the_table_has_the_place_that_was_found_beside_the_predicted_one():
    rows = [raced("megamoe", 3, 1.0), raced("a", 3, 0.8), raced("b", 3, 0.9, goes_on=False)]
    rows += [raced("megamoe", 24, 1.0), raced("a", 24, 0.7)]
    predicted = {name: {"us": us} for name, us in (("a", 9.0), ("b", 6.0), ("megamoe", 10.0))}
    table = TABLES["better"]({"rows": rows, "predicted": predicted})
    said = [[*cells] for cells in zip(*(column.cells for column in table.columns), strict=True)]
    assert [(row[0], row[1], *row[4:]) for row in said] == [
        ("a", "24", "1", "2 (0.900)"),
        ("megamoe", "24", "3", "3 (1.000)"),
        ("b", "3", "2", "1 (0.600)"),
    ]


def test_the_table_of_options_that_won_is_printed_where_it_is_faster():
    ratio = {"median": 0.9, "low": 0.8, "high": 0.95}
    section = {"won": {"chunks": 4, "chunk_by": "tokens"}, "ratio": ratio, "is_faster": True}
    assert SAYS["better"](section).endswith('[megamoe]\n  chunks = 4\n  chunk_by = "tokens"')
    assert "[megamoe]" not in SAYS["better"]({**section, "is_faster": False})


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
    left_out = {**report, "passes": [{"pass": "split_batch", "dropped": "as asked"}]}
    assert plan_of(report) == plan_of(left_out)
    assert plan_of({**report, **change}) != plan_of(report)


def race_a_step(rank, folder):
    """Race the ways to run one layer, node by node, on two ranks."""
    forget_compiled()
    keep_many_programs()
    torch.manual_seed(0)
    layer = GroupedExperts(16, 24, 8, 2, dist.group.WORLD)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    rows = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)

    def step(number):
        loss = layer(rows).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    options = {"megamoe.chunks": 1, "megamoe.equal_tokens": True}
    given = {"model": layer, "optimizer": optimizer, "step": step, "options": options}
    job = ScriptSteps(given_by(given), {"codegen": "fx"})
    store, record = dist.FileStore(str(Path(folder) / "store"), 2), None
    if rank == 0:
        record = Record(path=Path(folder) / "better.json", deadline=time.monotonic() + 600)
    team = Team(store, rank, 2, record=record, makes_groups=False)
    check_better(team, job, job.config)
    return None if record is None else record.data


@pytest.mark.slow
def test_candidates_of_the_planner_are_predicted_and_raced_on_all_ranks(two_ranks, tmp_path):
    found, _ = two_ranks.run(race_a_step, str(tmp_path))
    assert found["failures"] == []
    numbers = [one["chunks"] for one in found["ways"] if one.keys() == {"chunks"}]
    assert {2, 4} <= {*numbers}
    assert all(found["predicted"][f"chunks = {n}"]["us"] > 0.0 for n in (2, 4))
    assert AS_ASKED.name in found["predicted"]
    raced = {row["form"] for row in found["rows"]}
    assert {AS_ASKED.name, "chunks = 2", "chunks = 4"} <= raced
    assert found["rows"][-1]["rounds"] == ROUNDS and found["won"]


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
    with pytest.raises(InvalidConfig, match=r"write into it yourself: chunks = 4"):
        with_options("megamoe = { chunks = 2 }\n", "megamoe", {"chunks": 4})
