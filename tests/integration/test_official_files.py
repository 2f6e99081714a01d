"""torchtitan 0.2.2's own files for MoE models, with our three keys added, do what docs say of them.

`official/` has the keys and values of `torchtitan/models/MODEL/train_configs/FILE` as
`MODEL-FILE`.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from moe_compile.errors import InvalidConfig
from tests.integration.titan_jobs import train
from tests.slow_parameters import exhaustive_but
from torchtitan_integration.job_checks import checked_ranks
from torchtitan_integration.job_file import read_job

ROOT = Path(__file__).parents[2]
FILES = sorted((Path(__file__).parent / "official").glob("*.toml"))
THREE_KEYS = {
    "compile": ("enable = true", 'backend = "megamoe"'),
    "experimental": ('custom_import = "torchtitan_integration.register"',),
}
"""By section; what docs/torchtitan.md says to add."""
MACHINES = {"deepseek_v3_16b": 8, "llama4_17bx16e": 8, "llama4_17bx128e": 32}
"""Ranks that the degrees of a file ask for; others take any number."""
REFUSED = {
    "llama4-llama4_17bx128e": "write training.local_batch_size = 4",
}
"""What is said of a file before a process starts; with this it is as the others."""
FLAVORS = {"qwen3": "debugmodel_moe"}
AXES = ("tensor", "pipeline", "expert", "expert_tensor")
ON_A_CPU = {
    "training.dataset": "python_stdlib",
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.steps": 2,
    "profiling.enable_profiling": False,
    "metrics.log_freq": 1,
    "metrics.disable_color_printing": True,
    "comm.trace_buf_size": 0,  # the flight recorder needs NCCL
    "job.custom_config_module": "torchtitan_integration.job_config",
    "megamoe.codegen": "fx",
}
CHOSEN = [path for path in FILES if path.stem.endswith(("deepseek_v3_16b", "llama4_17bx128e"))]
"""One with exchanges, which compiles the loss alone; one on every axis but EP."""


def with_three_keys(path, folder):
    """Write the file as a user would who adds the keys; return its path."""
    sections = {"": []}
    for line in path.read_text().splitlines():
        if line.startswith("["):
            sections[line.strip("[]")] = []
        else:
            sections[next(reversed(sections))].append(line)
    for section, lines in THREE_KEYS.items():
        names = [line.partition(" = ")[0] for line in lines]
        kept = [x for x in sections.get(section, []) if x.partition(" = ")[0] not in names]
        sections[section] = [*lines, *kept]
    written = folder / path.name
    text = [f"[{name}]\n" * bool(name) + "\n".join(lines) for name, lines in sections.items()]
    written.write_text("\n".join(text))
    return written


def machine_of(path):
    return MACHINES.get(path.stem.partition("-")[2], 2)


def as_said(path):
    """Return the flag that makes a refused file one that is not; none for others."""
    key, _, value = REFUSED.get(path.stem, "").removeprefix("write ").partition(" = ")
    return [f"--{key}={value}"] if key else []


def small_job(path, folder):
    """Return settings of a job by the file that fits a CPU, degrees at most two, and its ranks."""
    content = tomllib.loads(path.read_text())
    degrees = {
        axis: min(2, content["parallelism"].get(f"{axis}_parallel_degree", 1)) for axis in AXES
    }
    settings = {
        **ON_A_CPU,
        "job.config_file": with_three_keys(path, folder),
        "job.dump_folder": folder,
        "model.flavor": FLAVORS.get(content["model"]["name"], "debugmodel"),
        **{f"parallelism.{axis}_parallel_degree": n for axis, n in degrees.items()},
    }
    return settings, max(2, degrees["tensor"] * degrees["pipeline"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_three_keys_make_it_a_job_without_a_fault(tmp_path, path):
    written = with_three_keys(path, tmp_path)
    if path.stem in REFUSED:
        with pytest.raises(InvalidConfig, match=REFUSED[path.stem]):
            checked_ranks(read_job(written, []), None, is_run=False)
    job = read_job(written, as_said(path))
    assert checked_ranks(job, machine_of(path), is_run=False) == machine_of(path)
    assert job.content["compile"]["backend"] == "megamoe" and job.content["compile"]["enable"]


@pytest.mark.parametrize("path", exhaustive_but(CHOSEN, FILES), ids=lambda path: path.stem)
def test_two_steps_of_its_debug_flavor_pass(pool_for, tmp_path, path):
    settings, ranks = small_job(path, tmp_path)
    results = train(pool_for(ranks), ranks, tmp_path, settings, base={})
    assert sorted(results[-1].steps) == [1, 2]
    has_exchanges = settings["parallelism.expert_parallel_degree"] > 1
    assert bool(results[-1].verdicts) is has_exchanges


@pytest.mark.parametrize("path", exhaustive_but(CHOSEN, FILES), ids=lambda path: path.stem)
def test_its_dry_run_passes(tmp_path, path):
    done = subprocess.run(
        [sys.executable, "-m", "moe_compile.cli", "train", with_three_keys(path, tmp_path),
         "--dry-run", f"--world={machine_of(path)}", *as_said(path)],
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    has_exchanges = "expert_parallel_degree = 8" in path.read_text()
    assert ("chunked" in done.stdout) is has_exchanges


def test_the_table_in_the_docs_has_every_file():
    page = (ROOT / "docs/torchtitan.md").read_text()
    rows = re.findall(r"^\| `(\w+)/train_configs/(\w+\.toml)` \|", page, re.MULTILINE)
    assert sorted("-".join(row) for row in rows) == [path.name for path in FILES]
