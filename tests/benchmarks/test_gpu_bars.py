"""Every bar of the check on one GPU holds of what is right, and is missed for one seeded fault."""

import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.bars import judge
from benchmarks.gpu import unit_tests
from benchmarks.gpu.bars import BARS
from benchmarks.gpu.host_copies import TO_HOST, judge_events
from benchmarks.gpu.layer_check import _judge_order
from benchmarks.gpu.layer_step import CodeOrder
from tests.benchmarks.sections import FAILED, check_bar, failures, section


def layer(four_s):
    times = {1: 10.0, 4: four_s}
    return section(*({"variant": f"megamoe N={n}", "compile_s": s} for n, s in times.items()))


def trace(more):
    kernels = {"megamoe N=1": (50, 80), "megamoe N=2": (60, 80 + more)}
    return section(
        *({"variant": v, "forward_kernels": f, "backward_kernels": b}
          for v, (f, b) in kernels.items())
    )  # fmt: skip


def link(high):
    ratio = {"median": 0.9, "low": 0.8, "high": high}
    return section({"setting": "1:1", "variant": "megamoe N=4", "vs_best_inductor": ratio})


def copies(share):
    found = ((4096, 0.1), (65536, 0.9), (65536, share))
    return section(*({"rows": rows, "fraction_of_copy": reached} for rows, reached in found))


SEEDED = {
    "quantised rows equal plain PyTorch": (section(), FAILED),
    "quantised rows at 0.7 of a copy's bandwidth": (copies(0.71), copies(0.69)),
    "products of some experts have the bits of all": (section(), FAILED),
    "errors near inductor's, products under exchanges both ways": (section(), FAILED),
    "four chunks compile in 2.0 x one chunk's time": (layer(19.0), layer(21.0)),
    "one copy to the host forward, none backward": (section(), FAILED),
    "two chunks launch at most 15 kernels more": (trace(15), trace(16)),
    "megamoe N=4 is faster than Inductor's best at 1:1, emulated": (link(0.99), link(1.01)),
    "tests pass on this torch and GPU": (section(), FAILED),
}
"""Bar -> results for which it holds, and results with one fault."""


@pytest.mark.parametrize(("name", "what"), [bar[:2] for bar in BARS])
def test_a_bar_holds_and_is_missed_and_is_open(name, what):
    check_bar(BARS, name, what, SEEDED)


def test_a_bar_whose_variants_were_skipped_is_open():
    """It held: of what did not run nothing failed."""
    without = section({"variant": "inductor"}, skipped=[{"what": "megamoe N=4", "why": "late"}])
    held = {bar.what: bar.holds for bar in judge({"layer": without, "trace": without}, BARS)}
    assert held["errors near inductor's, products under exchanges both ways"] is None
    assert held["one copy to the host forward, none backward"] is None
    beside = section(skipped=[{"what": "inductor pack width 4096", "why": "late"}])
    held = {bar.what: bar.holds for bar in judge({"kernels": beside}, BARS)}
    assert held["quantised rows equal plain PyTorch"] is True


def test_code_without_a_product_under_an_exchange_fails(record):
    orders = (
        CodeOrder(letters="LmW", products_under=(0, 2)),
        CodeOrder(letters="LWm", products_under=(0, 0)),
    )
    _judge_order(record, "megamoe N=2", SimpleNamespace(orders=orders))
    assert failures(record) == ["megamoe N=2, backward"]
    _judge_order(record, "one graph", SimpleNamespace(orders=orders[:1]))
    assert failures(record)[1:] == ["one graph"]


def test_copies_that_the_profiler_does_not_name_so_are_missed(record):
    """A name of another CUPTI would have made every number of copies hold."""
    named = Counter({f"{TO_HOST} (Device -> Pageable)": 1, "kernel": 5})
    judge_events(record, named, "forward", most=1, device="cuda")
    assert failures(record) == []
    other = Counter({"Memcpy D2H": 1, "kernel": 5})
    judge_events(record, other, "forward", most=1, device="cuda")
    assert failures(record) == ["forward"]


@pytest.mark.parametrize(
    ("code", "counts", "failed"),
    [
        (0, 'tests="3" failures="0" errors="0" skipped="1"', []),
        (1, 'tests="3" failures="1" errors="0" skipped="0"', ["unit tests"]),
        (0, 'tests="3" failures="0" errors="0" skipped="3"', ["unit tests"]),
    ],
    ids=["passed", "failed", "all skipped"],
)
def test_tests_that_fail_or_do_not_run_fail(record, monkeypatch, code, counts, failed):
    def run(command, **settings):
        report = next(a for a in command if a.startswith("--junitxml=")).partition("=")[2]
        text = f'<testsuites><testsuite {counts} time="1.0"/></testsuites>'
        Path(report).write_text(text)
        return subprocess.CompletedProcess(command, code, "done", "")

    monkeypatch.setattr(unit_tests.subprocess, "run", run)
    unit_tests._pytest(record, "unit", "", [], 10.0)
    assert failures(record) == failed
