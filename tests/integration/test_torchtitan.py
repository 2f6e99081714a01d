"""`megamoe train` on a torchtitan job, as a user runs it."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from moe_compile.testing.rank_pool import RankPool
from tests.integration.titan_jobs import CONFIG, ROOT, SMALL, STEP, flags_of, train


def run(folder, **settings):
    """Run the command; return its losses by step, and its output."""
    report = {"megamoe.report": folder / "report.json"}
    flags = flags_of({**SMALL, "job.dump_folder": folder, **report, **settings})
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "moe_compile.cli", "train", str(CONFIG), "--nproc=2", *flags],
        cwd=ROOT, env={**os.environ, **own},
        capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    losses = {int(step): loss for step, loss, _ in STEP.findall(done.stdout)}
    return losses, done.stdout + done.stderr


@pytest.mark.slow
def test_a_job_trains_and_ends_with_its_report(tmp_path):
    losses, output = run(tmp_path, **{"megamoe.codegen": "fx", "megamoe.strict": True})
    assert sorted(losses) == [1, 2, 3, 4, 5]
    report = json.loads((tmp_path / "report.json").read_text())
    assert [r["num_chunks"] for r in report["regions"]] == [2] * len(report["regions"])
    assert report["regions"] and report["dropped_passes"] == []
    assert "chunked, " in output


@pytest.mark.slow
def test_a_report_of_another_run_is_not_shown(tmp_path):
    old = tmp_path / "report.json"
    old.write_text("of another run, and not to be shown")
    _, output = run(tmp_path, **{"compile.enable": False, "training.steps": 2})
    last = output.splitlines()[-1]
    assert "nothing was compiled by megamoe" in last and "write compile.enable = true" in last


STOCK_TOML = """
[job]
dump_folder = "{folder}"
[model]
name = "deepseek_v3"
flavor = "tiny"
[training]
dataset = "python_stdlib"
local_batch_size = 2
seq_len = 64
steps = 2
mixed_precision_param = "float32"
[optimizer]
implementation = "foreach"
[parallelism]
expert_parallel_degree = 2
[metrics]
log_freq = 1
disable_color_printing = true
[comm]
trace_buf_size = 0
[activation_checkpoint]
mode = "none"
[compile]
enable = true
backend = "megamoe"
components = ["loss"]
[experimental]
custom_import = "tests.integration.tiny_flavors"
"""


@pytest.mark.slow
def test_a_stock_toml_with_three_keys_more_is_chunked(tmp_path):
    """No [megamoe] table, no config module of ours; options may come from the environment.

    What is imported registers ours, as a user's own module of flavors does. torchtitan's own files
    compile the loss alone. The report lies in the job's folder.
    """
    config = tmp_path / "job.toml"
    config.write_text(STOCK_TOML.format(folder=tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "moe_compile.cli", "train", str(config), "--nproc", "2"], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80",
             "MEGAMOE_CHUNKS": "2", "MEGAMOE_CODEGEN": "fx"},
        capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert [int(step) for step, _, _ in STEP.findall(done.stdout)] == [1, 2]
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["regions"] and {r["verdict"] for r in told["regions"]} == {"chunked"}
    assert told["dropped_passes"] == []
    assert "chunked, 2 chunks" in done.stdout
    assert "nothing was" not in done.stderr


@pytest.mark.slow
def test_with_inductor_losses_equal_plain_inductors(tmp_path):
    plain = {"megamoe.chunks": 1, "megamoe.schedule": False}
    with RankPool(2, timeout_s=590) as pool:
        for name, more in (("a", {"activation_checkpoint.mode": "none"}), ("b", {})):
            expected = train(pool, 2, tmp_path / f"{name}1", more, plain)[0].steps
            ours = train(pool, 2, tmp_path / f"{name}2", more, {"megamoe.chunks": 2})[0].steps
            for step, (loss, _) in ours.items():
                assert abs(float(loss) - float(expected[step][0])) <= 2e-4
