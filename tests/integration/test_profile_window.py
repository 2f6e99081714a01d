"""Exposed communication in a profiler's trace."""

import itertools
import json
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_integration.metrics import ProfileWindow, common, measure_trace, union

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), max_size=8).map(
    lambda spans: [(begin, begin + length) for begin, length in spans]
)


def kernel(name, begin, length):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": length}


def trace(folder, *events):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rank0_trace.json"
    path.write_text(json.dumps({"traceEvents": list(events)}))
    return path


def points(spans):
    return {x for begin, end in spans for x in range(begin, end)}


@given(SPANS, SPANS)
def test_unions_and_overlaps_cover_what_they_should(first, second):
    a, b = list(union(first)), list(union(second))
    assert points(a) == points(first)
    assert all(x[1] < y[0] for x, y in itertools.pairwise(a))
    assert points(common(a, b)) == points(first) & points(second)


def test_nccl_alone_is_exposed_and_under_compute_is_hidden(tmp_path):
    path = trace(
        tmp_path,
        kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 1000, 4000),
        kernel("ncclDevKernel_AllGather_RING", 2000, 1000),  # beside the other: counts once
        kernel("sm90_xmma_gemm_bf16", 3000, 6000),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9000},
    )
    assert measure_trace(path) == {"hidden_ms": 2.0, "exposed_ms": 2.0}


def test_a_trace_of_a_cpu_measures_nothing(tmp_path):
    with torch.profiler.profile() as profile:
        torch.ones(8, 8) @ torch.ones(8, 8)
    path = tmp_path / "trace.json"
    profile.export_chrome_trace(str(path))
    assert measure_trace(path) == {}


@pytest.mark.parametrize("broken", [False, True])
def test_a_new_trace_is_read_beside_training_and_an_old_one_never(tmp_path, broken):
    trace(tmp_path / "iteration_1", kernel("ncclX", 0, 7000))
    window = ProfileWindow(tmp_path, rank=0)
    assert window.poll() == {}
    path = trace(tmp_path / "iteration_2", kernel("ncclX", 0, 5000))
    if broken:
        path.write_text("half of a tra")
    end = time.monotonic() + 300
    while not (found := window.poll()) and time.monotonic() < end and not broken:
        time.sleep(0.05)
    assert found == ({} if broken else {"hidden_ms": 0.0, "exposed_ms": 5.0})
    window.close()
