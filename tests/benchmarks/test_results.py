from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.link.cases import PRESETS, RATIOS, ROUTED
from benchmarks.link.link_model import Crossing, LinkRate, Traffic
from benchmarks.link.measure import CaseResult, Job, Outcome
from benchmarks.link.results import rows_of, with_other_cases
from benchmarks.link.step import Sample
from benchmarks.link.variants import named_variants

JOB = Job(case=ROUTED, preset=PRESETS["quick"], clock="virtual", folder=Path(), cache=Path())
LATENCY, BYTES = 0.5, 100.0
TRAFFIC = Traffic([Crossing(BYTES), Crossing(0.0)])


def outcome(control_s, **ratios_s):
    """Two rounds of the same time at every ratio."""
    times = {"inf": control_s, **{name: ratios_s["linked"] for name in RATIOS}}
    sample = {
        name: [Sample(elapsed_s=t, traffic=TRAFFIC, page_faults=0)] * 2 for name, t in times.items()
    }
    return Outcome(samples=sample)


def result(**outcomes):
    rates = {name: LinkRate(latency_s=LATENCY, bytes_per_s=BYTES * r) for name, r in RATIOS.items()}
    return CaseResult(
        compute_s=2.0,
        rates=rates,
        comm_s={name: TRAFFIC.alone_s(rate) for name, rate in rates.items()},
        wire_bytes=BYTES,
        num_exchanges=2,
        profile="",
        outcomes=outcomes,
    )


def rows(**outcomes):
    return {(r.variant, r.ratio): r for r in rows_of(JOB, result(**outcomes))}


def test_the_bound_is_the_longer_of_compute_and_communication():
    row = rows(inductor=outcome(2.0, linked=4.0))
    assert row["inductor", "1:2"].bound_ms == 3000.0  # two latencies, 100 bytes at 50 a second
    assert row["inductor", "2:1"].bound_ms == 2000.0  # compute
    assert row["inductor", "2:1"].bound_fraction == 0.5
    assert row["inductor", "inf"].bound_ms == 2000.0


def test_ratios_are_against_the_same_rounds_of_the_baselines():
    both = {"inductor": outcome(2.0, linked=4.0), "inductor reorder": outcome(2.0, linked=3.0)}
    row = rows(**both, other=outcome(2.2, linked=2.4))["other", "1:1"]
    assert row.vs_inductor == pytest.approx(0.6)
    assert row.vs_inductor_reorder == pytest.approx(0.8)
    assert row.inf_bandwidth_ratio == pytest.approx(1.1)
    assert row.inf_bandwidth_pairs == 2


def test_the_least_time_is_the_longer_of_the_two_in_forward_and_backward_each():
    """0.5 s forward and 1.5 s backward; an exchange in each: 1.5 s and 0.5 s at 1:1."""
    other = outcome(2.0, linked=4.0)
    split = {"forward_s": 0.5, "forward_exchanges": 1}
    other.samples = {k: [replace(s, **split) for s in v] for k, v in other.samples.items()}
    row = rows(inductor=outcome(2.0, linked=4.0), other=other)
    assert row["other", "1:1"].least_ms == 3000.0
    assert row["other", "1:4"].least_ms == 6000.0  # 4.5 s of the forward's exchange
    assert row["other", "inf"].least_ms == 2000.0
    assert row["other", "1:1"].forward_ms == 500.0


def test_every_preset_names_variants_that_exist():
    for preset in PRESETS.values():
        assert len(named_variants(preset.variants)) == len(preset.variants)
        assert preset.control_rounds >= 20


def test_a_case_measured_again_replaces_its_rows_and_keeps_the_others():
    def file(**milliseconds):
        rows = [{"case": name, "ms": ms} for name, ms in milliseconds.items()]
        return {
            "clock": "virtual",
            "cases": [{"name": name} for name in milliseconds],
            "rows": rows,
        }

    both = with_other_cases(file(one=3.0), file(one=1.0, two=2.0))
    assert [case["name"] for case in both["cases"]] == ["two", "one"]
    assert both["rows"] == [{"case": "two", "ms": 2.0}, {"case": "one", "ms": 3.0}]
