"""Predictions hold within 15 % on recorded steps with real products, in virtual time."""

from pathlib import Path

import pytest

from benchmarks.planner.recorded_prediction import recorded_steps, summary

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
MAPE = 0.15


@pytest.fixture(scope="module")
def steps(no_group_stays):
    return list(recorded_steps(RESULTS / "overlap_bars_cpu.json"))


def test_recorded_steps_take_the_time_predicted(steps):
    found = summary(steps)
    assert found["settings"] >= 6
    assert found["mape"] <= MAPE
    assert found["mape_of_other_cases"] <= MAPE
    assert found["mape"] < found["mape_by_copy"]


def test_no_choice_is_surely_slower_than_one_chunk(steps):
    for name in ("choices", "choices_by_copy"):
        found = summary(steps)[name]
        assert found["surely_slower_than_one_chunk"] == 0
        assert found["slowest_against_one_chunk"] <= 0.0
