from hypothesis import given
from hypothesis import strategies as st

from moe_compile.check.paired import estimate, ratio

TIMES = st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=40)


def test_what_slows_a_whole_round_cancels():
    baseline = [10.0, 10.0, 30.0, 10.0, 50.0]
    measured = [8.0, 8.0, 24.0, 8.0, 40.0]
    result = ratio(measured, baseline)
    assert (result.median, result.low, result.high) == (0.8, 0.8, 0.8)
    assert result.num_pairs == 5


def test_a_known_sample_gives_an_interval_as_wide_as_order_statistics_say():
    """95 % for the median of 1..21: ranks 6 and 16 by the binomial; the bootstrap is within one."""
    result = estimate([float(i) for i in range(1, 22)])
    assert result.median == 11.0
    assert abs(result.low - 6.0) <= 1.0
    assert abs(result.high - 16.0) <= 1.0


@given(values=TIMES)
def test_the_interval_holds_the_median_and_repeats(values):
    result = estimate(values)
    assert min(values) <= result.low <= result.median <= result.high <= max(values)
    assert estimate(values) == result
