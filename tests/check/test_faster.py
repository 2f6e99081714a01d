"""What of a section of timed steps holds, on made-up numbers."""

import time

import pytest

from moe_compile.check.faster import judge_first, judge_steps
from moe_compile.check.forms import AS_ASKED, PLAIN
from moe_compile.check.sections import Record

FORMS = ("Inductor", "Inductor, reordered", "megamoe")


@pytest.fixture
def record(tmp_path):
    record = Record(path=tmp_path / "faster.json", deadline=time.monotonic() + 9)
    record.put(compiled={name: {"first_s": 1.0} for name in FORMS})
    return record


def seconds(ours, plain=1.0, reordered=0.9):
    noise = (1.0, 1.01, 0.99, 1.02, 0.98)
    times = dict(zip(FORMS, (plain, reordered, ours), strict=True))
    return [{name: [s * one for one in noise] for name, s in times.items()}]


@pytest.mark.parametrize(("ours", "is_missed"), [(0.85, False), (0.95, True)])
def test_on_gpus_megamoe_must_be_faster_than_the_better_of_inductors_settings(
    record, ours, is_missed
):
    judge_steps("cuda", record, seconds(ours))
    assert record.data["best"] == "Inductor, reordered"
    assert [f["why"].startswith("MISSED") for f in record.data["failures"]] == [True] * is_missed
    rows = {row["form"]: row for row in record.data["rows"]}
    assert rows["megamoe"]["ratio"]["median"] == pytest.approx(ours / 0.9)


def test_on_a_cpu_no_time_fails(record):
    judge_steps("cpu", record, seconds(5.0))
    assert not record.data["failures"] and record.data["is_measurement"] is False


def test_as_fast_as_inductor_is_not_faster(record):
    judge_steps("cuda", record, seconds(0.9))
    assert record.data["failures"]


def test_without_inductor_there_is_nothing_to_be_faster_than(record):
    judge_steps("cpu", record, [{"megamoe": [1.0]}])
    assert record.data["failures"] and not record.data["rows"]


def test_megamoe_that_rewrote_nothing_is_not_timed_as_megamoe(record):
    nothing = {"first_s": 1.0, "nothing": "no all-to-all", "without": []}
    done = {**nothing, "nothing": "", "without": ["megamoe without chunks"]}
    compiled = {}
    judge_first(AS_ASKED, compiled, record, [nothing, done])
    assert not record.data["failures"]
    assert compiled["megamoe"] == {"first_s": 1.0, "without": ["megamoe without chunks"]}
    judge_first(AS_ASKED, compiled, record, [nothing, nothing])
    assert "no all-to-all" in record.data["failures"][0]["why"]
    judge_first(PLAIN, compiled, record, [{"first_s": 3.0}, {"first_s": 4.0}])
    assert compiled["Inductor"]["first_s"] == 4.0
