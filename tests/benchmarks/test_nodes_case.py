"""What the case of two levels tells megamoe, and what its results say of both links."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.link.cases import INSIDE_LATENCY_S, LATENCY_S, PRESETS, ROUTED
from benchmarks.link.link_model import Crossing, LinkRate, Traffic
from benchmarks.link.machine import measure_profile, write_profile
from benchmarks.link.measure import CaseResult, Job, Outcome, link_rate
from benchmarks.link.results import header_of_case, rows_of
from benchmarks.link.step import Sample
from benchmarks.link.subjects import Values
from benchmarks.link.variants import named_variants
from moe_compile.cost.rates import Rates
from moe_compile.hardware import load_profile

PRESET = PRESETS["nodes"]
OWN, SHARED = PRESET.cases[0], PRESET.cases[-1]
FLAT = [Crossing(4e6, 2e6)] * 4
STEP = Sample(elapsed_s=1.0, traffic=Traffic(FLAT), page_faults=0)


@pytest.mark.parametrize(("case", "ranks"), [(OWN, 1), (SHARED, 2)], ids=["own", "shared"])
def test_between_nodes_the_flat_exchange_takes_twice_the_compute(case, ranks):
    rate = link_rate(STEP, 1.0, 0.5, case)
    assert STEP.traffic.alone_s(rate) == pytest.approx(2.0)
    assert (rate.latency_s, rate.inside_latency_s) == (LATENCY_S, INSIDE_LATENCY_S)
    assert rate.inside_bytes_per_s == pytest.approx(6 * rate.bytes_per_s / ranks)


def test_one_level_has_no_link_inside():
    assert link_rate(STEP, 1.0, 0.5, ROUTED).inside_s(1e9) == 0.0


@pytest.mark.parametrize(("case", "ranks"), [(OWN, 1), (SHARED, 2)], ids=["own", "shared"])
def test_the_profile_has_both_links_and_prices_each_hop_by_its_own(case, ranks, tmp_path):
    rate = LinkRate(
        latency_s=50e-6, bytes_per_s=4e8, inside_latency_s=10e-6, inside_bytes_per_s=12e8
    )
    small = replace(case, tokens=8, width=64, hidden=64)
    write_profile(measure_profile(small, rate), tmp_path / "profile.toml")
    profile = load_profile(str(tmp_path / "profile.toml"))
    inside, across = Rates.of(profile, 2, 2), Rates.of(profile, 2, 1)
    flat = Rates.of(profile, 4, 2)
    assert inside.link_us(1.2e6) == pytest.approx(10 + 1000)
    assert across.link_us(4e5) == pytest.approx(50 + 1000 * ranks)
    assert flat.link_us(6e5) == pytest.approx(50 + 1000 * ranks)  # 4e5 of them cross, 2e5 do not
    assert flat.overlap_slowdown == inside.contention == 0.0


def outcome(seconds, **found):
    steps = [replace(STEP, elapsed_s=seconds)] * 2
    return Outcome(samples={"inf": [STEP] * 2, "1:2": steps}, **found)


def test_hops_are_held_against_the_fastest_flat_way():
    """And results tell the bytes on both links, and whether bits were the same."""
    job = Job(case=OWN, preset=PRESET, clock="virtual", folder=Path(), cache=Path())
    (exact,) = named_variants(("exact",))
    flat = {f"flat N={n}": outcome(s) for n, s in ((1, 3.0), (2, 2.0), (4, 2.5))}
    rate = link_rate(STEP, 1.0, 0.5, OWN)
    measured = CaseResult(
        compute_s=1.0, rates={"1:2": rate}, comm_s={"1:2": 2.0}, wire_bytes=16e6, num_exchanges=4,
        profile="", outcomes={
            "inductor": outcome(4.0), **flat,
            "exact": outcome(1.5, rivals=exact.rivals, has_bits=True),
        },
    )  # fmt: skip
    row = next(r for r in rows_of(job, measured) if (r.variant, r.ratio) == ("exact", "1:2"))
    assert (row.rival, row.vs_rival) == ("flat N=2", 0.75)
    assert (row.wire_bytes, row.inside_bytes) == (16e6, 8e6)
    assert row.has_bits
    link = header_of_case(job, measured)["links"]["1:2"]
    assert link["inside_mb_per_s"] == pytest.approx(6 * link["mb_per_s"])


def test_one_bit_is_a_difference():
    ours = Values(torch.ones(2), torch.ones(2), (torch.ones(2),))
    theirs = Values(torch.ones(2), torch.ones(2), (torch.ones(2) + 2**-23,))
    assert ours.same_bits(ours) and not ours.same_bits(theirs)
