"""The check on one GPU, as far as a processor can try it."""

import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler_util import FunctionEvent

from benchmarks.gpu import sliced_products
from benchmarks.gpu.exact_layer import exact_results, relative_errors
from benchmarks.gpu.host_copies import judge_events, on_device
from benchmarks.gpu.kernels import measure_op
from benchmarks.gpu.lanes import ProcessorLane
from benchmarks.gpu.layer_step import LayerStep
from benchmarks.gpu.link_rows import Step, rows_of
from benchmarks.gpu.row_ops import ROW_OPS
from benchmarks.gpu.sizes import H200, PROMISED_S, SMOKE
from moe_compile.check.limited_process import run_limited
from moe_compile.check.sections import ALIKE, LONGEST_S, passed_before, write_json

ROOT = Path(__file__).parents[2]


def on_disk(record):
    return json.loads(record.path.read_text())


def run_check(folder):
    command = [sys.executable, "-m", "benchmarks.gpu", "--device=cpu", f"--out={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done, json.loads((folder / "summary.json").read_text())


def profiled_on(device, names):
    """Return events as the profiler makes them: their device is equal to torch's name of it."""
    own = [torch.autograd.DeviceType(int(device)) for _ in names]
    times = enumerate(zip(names, own, strict=True))
    return [FunctionEvent(i, name, 0, i, i + 1, device_type=kind) for i, (name, kind) in times]


def test_copies_to_the_host_are_counted_on_the_device_alone(record):
    """Nothing was counted, so that no number of copies failed."""
    kinds = torch.autograd.DeviceType
    copy = "Memcpy DtoH (Device -> Pageable)"
    events = on_device(
        profiled_on(kinds.CUDA, [copy, "triton_poi_fused_0", copy, "Memset (Device)"])
        + profiled_on(kinds.CPU, ["aten::mm", copy])
    )
    assert judge_events(record, events, "two", most=1, device="cuda") == (
        2,
        {"triton_poi_fused_0": 1},
    )
    nothing = on_device(profiled_on(kinds.CPU, ["aten::mm"]))
    judge_events(record, nothing, "none", most=1, device="cuda")
    judge_events(record, nothing, "on a processor", most=1, device="cpu")
    failed = [failure["what"] for failure in on_disk(record)["failures"]]
    assert failed == ["two", "none", "none"]  # neither copies nor kernels were seen


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The folder of a check of every section, and what it printed."""
    folder = tmp_path_factory.mktemp("check")
    return folder, *run_check(folder)


@pytest.mark.slow
@pytest.mark.alone
def test_every_section_passes_without_a_gpu(checked):
    folder, done, summary = checked
    statuses = {name: found["status"] for name, found in summary["sections"].items()}
    assert set(statuses.values()) == {"passed"}, done.stdout
    assert done.returncode == 0
    layer = json.loads((folder / "layer.json").read_text())
    forward, backward = layer["rows"][1]["orders"]
    assert any(forward["products_under"]) and any(backward["products_under"])


@pytest.mark.parametrize("op", ROW_OPS, ids=lambda op: op.name)
def test_an_operator_that_is_right_has_no_failure(record, op):
    measure_op(record, SMOKE, 16, 130, op)
    assert not on_disk(record)["failures"]
    assert on_disk(record)["rows"][0]["is_equal"]


@pytest.mark.parametrize("op", ROW_OPS, ids=lambda op: op.name)
def test_an_operator_with_one_wrong_element_is_a_failure(record, op):
    def wrong(*arguments):
        out = op.ours(*arguments).clone()
        out[3, 5] += 1
        return out

    measure_op(record, SMOKE, 16, 130, dataclasses.replace(op, ours=wrong))
    (failure,) = on_disk(record)["failures"]
    assert failure["why"].startswith("1 of ")


def test_the_exact_layer_is_the_layer_up_to_bfloat16():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    step = LayerStep(SMOKE.case, dist.group.WORLD, "cpu")
    exact = exact_results(step.layer, step.tokens, step.grad)
    errors = relative_errors(step.results(step.layer), exact)
    assert set(errors) == {"out", "input_grad", "router", "gate", "up", "down"}
    assert max(errors.values()) < 0.01
    with torch.no_grad():
        step.layer.down[1] *= 1.2  # of one expert
    assert max(relative_errors(step.results(step.layer), exact).values()) > 0.02


def test_what_a_lane_carries_is_not_there_before_it_is_waited_for():
    lane = ProcessorLane()
    lane.poisons = True
    source, target = torch.randn(2, 8)
    exchange = lane.launch(target, source)
    assert target.isnan().all()
    lane.wait(exchange)
    assert torch.equal(target, source)


def steps(*seconds):
    nothing = {"host_s": 0.0, "link_s": 0.0, "num_bytes": 0, "num_exchanges": 0}
    return [Step(seconds=s, **nothing) for s in seconds]


def test_ratios_are_against_the_quickest_of_inductors_settings():
    made = {
        "inductor": steps(4.0, 4.0),
        "inductor reorder": steps(2.0, 2.0),
        "megamoe N=4": steps(1.0, 1.0),
    }
    ours = rows_of("1:1", made, compute_ms=500.0)[-1]
    assert ours["best_inductor"] == "inductor reorder"
    assert (ours["vs_inductor"]["median"], ours["vs_best_inductor"]["median"]) == (0.25, 0.5)
    assert ours["over_bound"] == 2.0


def test_an_item_that_raises_is_recorded_and_the_next_one_runs(record):
    assert record.attempt("division", lambda: 1 / 0) is None
    assert record.attempt("sum", lambda: 1 + 1) == 2
    (failure,) = on_disk(record)["failures"]
    assert failure["why"] == "ZeroDivisionError: division by zero"
    assert "1 / 0" in failure["traceback"]


def test_an_item_that_no_longer_fits_is_skipped(record):
    assert record.attempt("long", lambda: 1, needs_s=1000.0) is None
    (skipped,) = on_disk(record)["skipped"]
    assert skipped["what"] == "long" and "out of time" in skipped["why"]


def test_a_number_that_is_none_is_null_on_disk(record):
    record.add_row({"error": math.nan, "rates": [math.inf, 1.0]})
    assert on_disk(record)["rows"] == [{"error": None, "rates": [None, 1.0]}]


def test_a_section_out_of_time_leaves_no_process(tmp_path):
    """Compile workers are children of the section: killing it alone would leave them."""
    mark = tmp_path / "pid"
    code = f"sleep 1000 & echo $! > {shlex.quote(str(mark))}; wait"
    assert run_limited(["sh", "-c", code], tmp_path / "log", 2.0, os.environ) is None
    stat = Path(f"/proc/{mark.read_text()}/stat")
    deadline = time.monotonic() + 300
    while stat.exists() and ") Z " not in stat.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not stat.exists() or ") Z " in stat.read_text()


def test_the_sections_fit_in_25_minutes_and_run_tests_that_are_there():
    assert sum(PROMISED_S.values()) <= 25 * 60 and max(PROMISED_S.values()) <= LONGEST_S == 8 * 60
    assert all((ROOT / path).exists() for path in (*H200.tests, *SMOKE.tests))


def test_one_wrong_element_of_a_chunks_product_is_a_failure(record, monkeypatch):
    right = sliced_products._products

    def wrong(rows, weights, grad, starts, experts):
        out, *grads = right(rows, weights, grad, starts, experts)
        out[0, 0] += experts.start == 2
        return out, *grads

    monkeypatch.setattr(sliced_products, "_products", wrong)
    sliced_products.check_slices(record, SMOKE)
    whys = {failure["why"].partition(" of ")[0] for failure in on_disk(record)["failures"]}
    assert whys == {"1"}


def test_what_passed_on_this_gpu_and_code_is_not_run_again(tmp_path):
    now = {"device": "cuda", "sources": "a", "machine": dict.fromkeys(ALIKE, "x")}
    assert passed_before(tmp_path, now) == {}
    sections = {"kernels": {"status": "passed"}, "link": {"status": "failed"}}
    write_json(tmp_path / "summary.json", {**now, "sections": sections})
    assert list(passed_before(tmp_path, now)) == ["kernels"]
    assert passed_before(tmp_path, {**now, "sources": "b"}) == {}
    assert passed_before(tmp_path, {**now, "machine": {**now["machine"], "gpu": "y"}}) == {}
