"""Hidden and exposed communication of a job's traces, as metrics."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from torchtitan.config import Profiling

from torchtitan_integration.cpu_launcher import cpu_profiler
from torchtitan_integration.metrics import ProfileWindow


def trace(folder, length):
    """Write a trace of one exchange on a GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rank0_trace.json"
    kernel = {"ph": "X", "cat": "kernel", "name": "ncclX", "ts": 0, "dur": length}
    path.write_text(json.dumps({"traceEvents": [kernel]}))
    return path


@pytest.mark.parametrize("broken", [False, True])
def test_a_new_trace_is_read_beside_training_and_an_old_one_never(tmp_path, broken):
    trace(tmp_path / "iteration_1", 7000)
    window = ProfileWindow(tmp_path, rank=0)
    assert window.poll() == {}
    path = trace(tmp_path / "iteration_2", 5000)
    if broken:
        path.write_text("half of a tra")
    end = time.monotonic() + 300
    while not (found := window.poll()) and time.monotonic() < end and not broken:
        time.sleep(0.05)
    assert found == ({} if broken else {"hidden_ms": 0.0, "exposed_ms": 5.0})
    window.close()


@pytest.mark.usefixtures("fake_ranks")
def test_a_cpu_is_profiled_in_torchtitans_steps_into_torchtitans_files(tmp_path):
    asked = Profiling(profile_freq=3, profiler_warmup=1, profiler_active=1)
    job = SimpleNamespace(profiling=asked, job=SimpleNamespace(dump_folder=str(tmp_path)))
    with cpu_profiler(job, 3) as profiler:  # resumed at step 3
        for _ in range(4):
            torch.ones(4, 4) @ torch.ones(4, 4)
            profiler.step()
    (path,) = tmp_path.rglob("*.*")
    assert path == tmp_path / "profile_traces" / "iteration_6" / "rank0_trace.json"
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("aten::mm") == 1
