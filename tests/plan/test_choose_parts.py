"""Which of the programs that were tried runs, in how many parts of the batch."""

import pytest

from moe_compile.journal.reasons import Reason
from moe_compile.plan.choose_plan import PartsDecision, TriedProgram, choose_parts


def program(parts, us, *off, chunks="auto", peak=100):
    return TriedProgram(num_parts=parts, chunks=chunks, us=us, off_us=off, peak_bytes=peak)


WHOLE = program(1, 100.0, 120.0, 90.0)


@pytest.mark.parametrize(
    ("others", "index", "reason"),
    [
        ([program(2, 80.0, 99.0, 80.0)], 0, None),
        ([program(2, 99.5, 110.0, 80.0)], None, Reason.BY_PRICE),  # gains too little
        ([program(2, 90.0, 110.0, 94.0)], 0, None),  # may lose less than half of its gain
        ([program(2, 90.0, 110.0, 95.0)], None, Reason.BY_PRICE),  # may lose more
        ([program(2, 80.0, 99.0, 80.0, peak=131)], None, Reason.MEMORY_CAP),
        ([program(2, 80.0, 99.0, 80.0, peak=130)], 0, None),
        ([program(2, 80.0, 99.0, 80.0), program(4, 70.0, 90.0, 70.0)], 1, None),
        ([program(4, 79.9, 99.0, 80.0), program(2, 80.0, 99.0, 80.0)], 1, None),  # a tie
        ([program(2, 80.0, 99.0, 80.0), program(2, 79.95, 99.0, 80.0, chunks=1)], 1, None),
        ([], None, Reason.BY_PRICE),
    ],
)
def test_the_fastest_that_is_safe_and_fits_runs(others, index, reason):
    chosen, why = choose_parts(WHOLE, others, 30.0)
    assert chosen is (WHOLE if index is None else others[index])
    assert why is reason


def test_a_decision_without_prices_has_no_measures():
    assert PartsDecision().measures == {}
    priced = PartsDecision(num_parts=2, whole_us=3.0, us=2.0)
    assert priced.measures == {"predicted_us_before": 3.0, "predicted_us": 2.0}
