"""A torchtitan job trained with megamoe prints the losses torchtitan prints without it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "torchtitan_integration/configs/deepseek_v3_debug_cpu.toml"
STEP = re.compile(r"step:\s+(\d+)\s+loss:\s+(\S+)\s+grad_norm:\s+(\S+)")


def train(folder, ranks, name, first_step=1, **settings):
    """Train five steps of the tiny flavor; return (loss, gradient norm) as printed, and output."""
    options = {
        "job.dump_folder": folder,
        "experimental.custom_import": "tests.integration.reference_spec",
        "model.name": name,
        "model.flavor": "tiny",
        "training.steps": 5,
        "training.local_batch_size": 2,
        "training.seq_len": 64,
        "parallelism.data_parallel_shard_degree": ranks,
        "megamoe.report": folder / "report.json",
        **settings,
    }
    flags = [f"--{key}={value}" for key, value in options.items() if not isinstance(value, bool)]
    flags += [f"--{key}" for key, value in options.items() if value is True]
    flags += [f"--{k.replace('.', '.no-', 1)}" for k, value in options.items() if value is False]
    run = subprocess.run(
        [sys.executable, "-m", "moe_compile.cli", "train", str(CONFIG), *flags],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    steps = STEP.findall(run.stdout + run.stderr)
    assert [int(step) for step, _, _ in steps] == list(range(first_step, 6))
    return [(loss, norm) for _, loss, norm in steps], run.stdout


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_equal_torchtitans_own_to_the_last_digit(tmp_path, ranks):
    old = tmp_path / "stock" / "report.json"
    old.parent.mkdir()
    old.write_text("of another run, and not to be shown")
    stock, output = train(
        tmp_path / "stock", ranks, "stock_deepseek_v3", **{"compile.enable": False}
    )
    assert f"no report was written to {old}" in output
    ours, output = train(
        tmp_path / "ours", ranks, "placed_deepseek_v3",
        **{"megamoe.codegen": "fx", "megamoe.chunks": 2, "megamoe.strict": True},
    )  # fmt: skip
    assert ours == stock
    report = json.loads((tmp_path / "ours" / "report.json").read_text())
    assert [r["num_chunks"] for r in report["regions"]] == [2] * len(report["regions"])
    assert report["regions"] and report["dropped_passes"] == []
    _check_placements(output, ranks)


def _check_placements(output, ranks):
    """Experts lie on efsdp x ep, all else on fsdp: two ranks alone would hide a missing efsdp."""
    placed = dict(line.split(" ", 2)[1:] for line in re.findall(r"PLACED .*", output))
    experts = {name: where for name, where in placed.items() if ".moe.experts." in name}
    assert len(experts) == 2 * 3  # two MoE layers of three weights
    local = 4 // 2 // (ranks // 2)  # of four experts, ep 2, the rest over efsdp
    for where in experts.values():
        assert where.startswith("efsdp,ep ")
        assert re.search(r"\((\d+),", where.rpartition(") ")[2]).group(1) == str(local)
    gathered = set(re.findall(r"GATHERED (\S+)", output))
    blocks = {f"layers.{i}" for i in range(3)}
    carriers = {f"layers.{i}.expert_carrier" for i in (1, 2)}
    assert gathered == {"root", "tok_embeddings", "norm", "output"} | blocks | carriers
    others = [where for name, where in placed.items() if name not in experts]
    assert others and all(where.startswith("fsdp ") for where in others)
    assert not any("expert_carrier" in name for name in placed)


@pytest.mark.slow
def test_our_layout_without_compilation_trains_as_torchtitans_does(tmp_path):
    stock, _ = train(tmp_path / "a", 4, "stock_deepseek_v3", **{"compile.enable": False})
    ours, _ = train(tmp_path / "b", 4, "placed_deepseek_v3", **{"compile.enable": False})
    assert ours == stock


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path):
    """The carrier shows FSDP the experts a second time: they must be saved and loaded once."""
    saved = {"checkpoint.enable": True, "checkpoint.interval": 2, "compile.backend": "aot_eager"}
    whole, _ = train(tmp_path, 4, "placed_deepseek_v3", **saved)
    shutil.rmtree(tmp_path / "checkpoint" / "step-5")
    shutil.rmtree(tmp_path / "checkpoint" / "step-4")
    rest, _ = train(tmp_path, 4, "placed_deepseek_v3", first_step=3, **saved)
    assert rest == whole[2:]


@pytest.mark.slow
def test_with_inductor_losses_equal_plain_inductors(tmp_path):
    plain, _ = train(tmp_path / "a", 2, "placed_deepseek_v3", **{"compile.backend": "inductor"})
    ours, _ = train(tmp_path / "b", 2, "placed_deepseek_v3", **{"megamoe.chunks": 2})
    for (loss, _), (expected, _) in zip(ours, plain, strict=True):
        assert abs(float(loss) - float(expected)) <= 2e-4
