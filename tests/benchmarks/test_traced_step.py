"""What `megamoe check` measures of collectives is what the emulated link has in its books."""

from pathlib import Path

import pytest

from benchmarks.link.cases import Case
from benchmarks.link.link_model import LinkRate
from benchmarks.link.post_board import create_board
from benchmarks.link.traced_step import trace_steps
from moe_compile.check.explained_errors import AS_PREDICTED, BANDWIDTH, LATENCY, fits_of, rows_of
from moe_compile.hardware import load_profile
from moe_compile.testing.rank_pool import RankPool

CASE = Case(name="small", num_ranks=2, tokens=512, experts=4, width=192, hidden=192)
CPU = load_profile("cpu")
LATENCY_S, BYTES_PER_S = CPU.link_latency_us * 1e-6, CPU.link_gb_per_s * 1e9
RATES = {
    "as the profile": LinkRate(latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S),
    "third of the bandwidth": LinkRate(latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S / 3),
    "late": LinkRate(latency_s=100 * LATENCY_S, bytes_per_s=BYTES_PER_S),
}
WITHIN = 0.1
"""Of the link's books: the bar of the measurement."""


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Return, for each rate, what each rank saw."""
    folder = Path(tmp_path_factory.mktemp("traced"))
    create_board(folder / "posts", CASE.num_ranks)
    with RankPool(CASE.num_ranks, timeout_s=600) as pool:
        found = pool.run(trace_steps, CASE, [*RATES.values()], 2, folder)
    return {name: [rank[i] for rank in found] for i, name in enumerate(RATES)}


@pytest.mark.slow
@pytest.mark.parametrize("rate", RATES)
def test_hidden_time_is_that_of_the_emulators_books(traced, rate):
    for rank in traced[rate]:
        assert rank.window.faults == []
        runs = [one for (seen,) in rank.window.seen.values() for one in [seen]]
        assert len(runs) == len(rank.booked) == 9
        measured, booked = (sum(x.hidden_us for x in of) for of in (runs, rank.booked))
        total = sum(one.end - one.begin for one in rank.booked)
        assert 0.1 * total < booked < 0.99 * total  # neither bar nothing nor all
        assert measured == pytest.approx(booked, rel=WITHIN)
        for one, book in zip(runs, rank.booked, strict=True):
            assert one.hidden_us == pytest.approx(book.hidden_us, abs=WITHIN * one.total_us)


@pytest.mark.slow
def test_a_link_as_in_the_profile_is_as_predicted_and_another_is_told_by_its_constant(traced):
    rows = {rate: list(rows_of([one.window for one in ranks])) for rate, ranks in traced.items()}
    assert {row["because"] for row in rows["as the profile"]} == {AS_PREDICTED}
    for rate, wanted in (("third of the bandwidth", BANDWIDTH), ("late", LATENCY)):
        large = [
            r for r in rows[rate] if r["predicted"]["total_us"] > 1000 and r["error_us"] > 1000
        ]
        assert large
        assert {row["because"] for row in large} == {wanted}
    slow = fits_of([one.window for one in traced["third of the bandwidth"]])
    late = fits_of([one.window for one in traced["late"]])
    (slow,), (late,) = slow.values(), late.values()
    assert slow.gb_per_s == pytest.approx(CPU.link_gb_per_s / 3, rel=WITHIN)
    assert late.latency_us == pytest.approx(100 * CPU.link_latency_us, rel=WITHIN)
