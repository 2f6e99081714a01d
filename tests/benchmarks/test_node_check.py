"""The check on several GPUs, as far as two processors can try it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.layer_step import GPU_VARIANTS
from benchmarks.node.beside import OWN, Share, judge_shares, of_own_budget, said_of
from benchmarks.node.hidden import judge_steps, judge_variant
from benchmarks.node.recipes import STEPS, judge_losses, most_off
from benchmarks.node.sizes import PROMISED_S
from benchmarks.node.summary import BARS
from moe_compile.check.hardware import write_profile
from moe_compile.check.limited_process import run_ranks
from moe_compile.check.links import EXCHANGE, GATHER
from moe_compile.check.ranks import Ranks
from moe_compile.check.sections import LONGEST_S, read_section
from moe_compile.hardware.profile import load_profile
from tests.benchmarks.sections import FAILED, check_bar, failures, section

ROOT = Path(__file__).parents[2]


def python(code):
    return [sys.executable, "-c", code]


def test_ranks_that_wait_for_one_that_failed_are_ended(tmp_path):
    commands = [python("raise SystemExit(3)"), python("import time; time.sleep(1000)")]
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    began = time.monotonic()
    codes = run_ranks(commands, logs, 600.0, [os.environ] * 2, patience_s=0.5)
    assert codes == [3, None] and time.monotonic() - began < 300
    assert run_ranks([python("")] * 2, logs, 600.0, [os.environ] * 2, patience_s=0.5) == [0, 0]


def test_sections_promise_no_more_than_eight_minutes_and_each_has_a_bar():
    assert max(PROMISED_S.values()) <= LONGEST_S == 8 * 60
    assert {name for name, _, _ in BARS} == set(PROMISED_S)


@pytest.mark.slow
def test_a_section_goes_on_in_new_processes_behind_the_item_in_which_a_rank_died(tmp_path):
    ranks = Ranks(tmp_path, "cpu", 2, "tests.benchmarks.dying_rank", settings={})
    ended = ranks.run("links", 400.0)
    found = read_section(tmp_path, "links")
    assert [row["sums"] for row in found["rows"]] == [[2.0, 2.0]] * 2
    assert ended["status"] == "failed" and ended["failures"] == ["dies"] and found["is_complete"]
    assert (tmp_path / "links_rank1_again1.log").exists()


def two_numbers(contention, slowdown):
    rows = (
        {"budget": said_of(OWN), "contention": contention, "overlap_slowdown": slowdown},
        {"budget": said_of(4), "contention": 9.0, "overlap_slowdown": 9.0},
    )
    return section(*rows)


def rates(exchange, gather):
    told = ((EXCHANGE, 8, exchange), (GATHER, 8, gather), (EXCHANGE, 16, 1.0), (GATHER, 16, 50.0))
    return section(
        *({"collective": c, "ranks": n, "bytes": 2**20, "us": 9.0, "gb_per_s": g}
          for c, n, g in told)
    )  # fmt: skip


def steps(high):
    ratio = {"median": 0.9, "low": 0.8, "high": high}
    told = (("inductor", 10.0, None), ("megamoe N=2", 9.0, ratio), ("megamoe N=4", 9.5, None))
    found = ({"variant": v, "step_ms": ms, "vs_best_inductor": r} for v, ms, r in told)
    return {**section(), "steps": [*found]}


def exposed(predicted):
    times = {"exposed_ms": 1.0, "hidden_ms": 3.0, "predicted": {"exposed_ms": predicted}}
    return section({"variant": "megamoe N=2", **times}, {"variant": "inductor", "predicted": {}})


SEEDED = {
    "a product beside an exchange slows by 0.3 at most": (
        two_numbers(0.29, 0.0), two_numbers(0.31, 0.0),
    ),
    "an exchange beside products slows by 0.5 at most": (
        two_numbers(0.0, 0.49), two_numbers(0.0, 0.51),
    ),
    "large exchanges reach 0.5 of a gather's rate": (rates(130.0, 250.0), rates(120.0, 250.0)),
    "results are near eager ones, and every trace has NCCL": (section(), FAILED),
    "the fastest number of chunks is faster than Inductor's best": (steps(0.99), steps(1.01)),
    "exposed time is predicted to 0.25 of the communication": (exposed(1.9), exposed(2.1)),
    "every rewrite and option has the bits of eager": (section(), FAILED),
    "small models train as they are written": (section(), FAILED),
}  # fmt: skip
"""Bar -> results for which it holds, and results with one fault."""


@pytest.mark.parametrize(("name", "what"), [bar[:2] for bar in BARS])
def test_a_bar_holds_and_is_missed_and_is_open(name, what):
    check_bar(BARS, name, what, SEEDED)


def test_a_product_that_the_exchange_did_not_outlast_fails(record):
    """Nothing ran beside it at its end, and its time says little."""
    share = Share(alone_s=[1.0] * 3, beside_s=[1.2] * 3, covered=0.5)
    whole = Share(alone_s=[1.0] * 3, beside_s=[1.5] * 3, covered=1.0)
    both = {"contention": share, "overlap_slowdown": whole}
    judge_shares("GEMM", OWN, 0.5, record, [both, both])
    assert failures(record) == []
    judge_shares("GEMM", 8, 0.8, record, [both, both])
    assert failures(record) == ["GEMM, at most 8 CTAs"]
    row = record.data["rows"][0]
    assert (row["contention"], row["overlap_slowdown"]) == pytest.approx((0.2, 0.5))


def variant_found(error, **trace):
    return {"compile_s": 1.0, "errors": {"out": error}, "predicted": {}, **trace}


def test_an_error_above_what_is_allowed_and_a_trace_without_nccl_fail(record):
    variant = GPU_VARIANTS["megamoe N=2"]
    traced = {"exposed_ms": 1.0, "hidden_ms": 2.0}
    right = [variant_found(0.01, **traced), variant_found(0.02, exposed_ms=3.0, hidden_ms=0.0)]
    judge_variant(variant, "cuda", record, right)
    judge_variant(variant, "cpu", record, [variant_found(0.0)])
    assert failures(record) == [] and record.data["rows"][0]["exposed_ms"] == 3.0
    judge_variant(variant, "cuda", record, [variant_found(0.021, **traced)] * 2)
    judge_variant(variant, "cuda", record, [variant_found(float("nan"), **traced)])
    judge_variant(variant, "cuda", record, [variant_found(0.0)])
    assert failures(record) == ["megamoe N=2"] * 3
    judge_steps(record, [{}, {}])
    assert failures(record)[3:] == ["steps in turn"]


def test_a_job_that_trains_otherwise_or_not_to_its_end_fails(record):
    written = dict.fromkeys(range(1, STEPS + 1), (8.0, 2.0))
    for name, ours in {
        "right": written | {5: (8.1, 2.0)},
        "loss": written | {5: (8.2, 2.0)},
        "norm": written | {1: (8.0, 1.9)},
        "nan": written | {3: (float("nan"), 2.0)},
        "nothing": {},
    }.items():
        judge_losses(name, record, [{"steps": STEPS, "most_off": most_off(ours, written)}])
    assert failures(record) == ["loss", "norm", "nan", "nothing"]
    judge_losses("short", record, [{"steps": STEPS - 1, "most_off": 0.0}])
    assert failures(record)[4:] == ["short"]


MACHINE = {"cpu": "a processor", "gpu": "a GPU", "torch": "2.13.0"}


def measured(tmp_path, *sizes, start="h100"):
    rows = [
        {"collective": c, "ranks": n, "bytes": b, "us": us, "gb_per_s": rate}
        for n in sizes
        for c, b, us, rate in (
            (EXCHANGE, 1, 9.0, 0.0),
            (EXCHANGE, 8, 9.9, 225.0),
            (GATHER, 8, 9.9, 360.0),
        )
    ]
    own = {"product": "grouped GEMM", "budget": said_of(OWN), "contention": 0.1}
    beside = of_own_budget({"rows": [{**own, "overlap_slowdown": -0.01}]})
    return load_profile(str(write_profile(tmp_path, start, MACHINE, rows, beside=beside)))


def test_the_profile_has_the_links_that_were_measured_and_its_start_all_else(tmp_path):
    profile, start = measured(tmp_path, 8), load_profile("h100")
    node = profile.node
    assert (node.exchange_gb_per_s, node.latency_us) == (225.0, 9.0)
    assert (node.contention, node.overlap_slowdown, node.gather_over_exchange) == (0.1, 0.0, 1.6)
    assert node.origins["latency_us"].startswith("measured: ")
    assert profile.link_gb_per_s == start.link_gb_per_s
    assert profile.matmul_tflops == start.matmul_tflops


def test_among_two_machines_the_network_has_the_bytes_that_cross_it(tmp_path):
    profile = measured(tmp_path, 8, 16)
    assert profile.node.exchange_gb_per_s == 225.0
    assert profile.node.contention == 132 / 116 - 1  # as assumed
    assert profile.link_gb_per_s == pytest.approx(225.0 * 8 / 15)
    assert profile.network.contention == 0.1


def run_check(folder, *more):
    command = [sys.executable, "-m", "benchmarks.node", "--device=cpu", f"--out={folder}", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done, json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.alone
def test_every_section_passes_on_two_processors_and_is_not_run_again(tmp_path):
    done, summary = run_check(tmp_path)
    statuses = {name: found["status"] for name, found in summary["sections"].items()}
    assert statuses == dict.fromkeys(PROMISED_S, "passed"), done.stdout + done.stderr
    assert done.returncode == 0
    again, _ = run_check(tmp_path)
    assert again.returncode == 0
    assert "bits: it passed in an earlier run" in again.stdout
