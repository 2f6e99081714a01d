"""Torchtitan jobs, one after another, in the ranks of a pool: torch is imported once for all.

A job is the debug TOML with flags. Every rank tells what torchtitan printed and how the model lay.
"""

import importlib
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from moe_compile.testing.rank_pool import meeting_point
from torchtitan_integration.layout import DEGREES, KEYS

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "torchtitan_integration/configs/deepseek_v3_debug_cpu.toml"
STEP = re.compile(r"step:\s+(\d+)\s+loss:\s+(\S+)\s+grad_norm:\s+(\S+)")
VALIDATED = re.compile(r"validate step:\s+\d+\s+loss:\s+(\S+)")
STEPS = 5
SMALL = {
    "model.flavor": "tiny",
    "experimental.custom_import": "tests.integration.tiny_flavors",
    "training.steps": STEPS,
    "training.local_batch_size": 2,
    "training.seq_len": 64,
    "training.dataset_path": "of each rank",
    "optimizer.lr": 2e-3,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.expert_parallel_degree": 2,
    "megamoe.report": "",
    "metrics.disable_color_printing": True,
}
PIPELINE = {"model.flavor": "tiny_pipeline", "training.local_batch_size": 4}
ONE_TEXT = {"training.dataset_path": "one_stream"}
OURS = {"megamoe.codegen": "fx", "megamoe.chunks": 2, "megamoe.strict": True}
STOCK = {"compile.enable": False}
NOT_COMPILED = {"compile.enable": False, "compile.backend": "aot_eager"}
"""Our layout without megamoe: the tests' specs take any backend that is not ours for this."""
VALIDATES = {
    "validation.enable": True,
    "validation.dataset": "python_stdlib",
    "validation.freq": 1,
    "validation.steps": 1,
    "validation.local_batch_size": 2,
    "validation.seq_len": 64,
}
LOGGED = {"metrics.enable_tensorboard": True, "metrics.save_tb_folder": "tb"}
SAVES = {"checkpoint.enable": True, "checkpoint.interval": 2}


@dataclass
class JobResult:
    """What one rank saw of a job."""

    steps: dict = field(default_factory=dict)
    """Step -> (loss, gradient norm) as printed."""
    placements: dict = field(default_factory=dict)
    """Parameter -> (axes of its mesh, placements, local shape)."""
    gathered: list = field(default_factory=list)
    """Modules that FSDP gathers, "" being the root."""
    groups: dict = field(default_factory=dict)
    """Mesh axis -> name of its process group, for the experts' mesh and `fsdp`."""
    parameters: dict = field(default_factory=dict)
    """Parameter -> hash of all its values, as they were before the first step."""
    experts: dict = field(default_factory=dict)
    """Parameter that has one part per expert -> hash of each expert's part, as `parameters`."""
    loaded: dict = field(default_factory=dict)
    """What was loaded of a checkpoint: name in the model, or of the optimizer's state -> hash."""
    rows: list = field(default_factory=list)
    """Per step: rows of this rank's tokens, by MoE layer and expert."""
    choices: list = field(default_factory=list)
    """Per step: rows as routers chose them while training, where nothing is compiled."""
    bias: list = field(default_factory=list)
    """After each step: the bias on the choice, by MoE layer with one and expert."""
    validated: list = field(default_factory=list)
    """Losses of validation, as printed."""
    chunks: list = field(default_factory=list)
    """Number of chunks of every region compiled in this job."""
    verdicts: list = field(default_factory=list)
    remarks: list = field(default_factory=list)
    """On all regions."""
    attention: list = field(default_factory=list)
    """(Whether it is a region, verdict) of every attention in graphs that have a region."""
    graphs: list = field(default_factory=list)
    state_keys: list = field(default_factory=list)


@dataclass
class PlainJob:
    """A job that several files of tests look at."""

    ranks: list
    """Each rank's JobResult."""
    folder: Path
    num_rounded: list
    """Modules, by rank, whose gradients were rounded on their way."""


MOST_JOBS = 6
"""Jobs that one process runs: each leaves groups of gloo that nothing in Python refers to, and
their threads wake 100 times a second; those of 60 jobs took both cores."""

num_jobs = Counter()
"""Jobs by ranks of their pool."""


def train(pool, ranks, folder, *changes, renewed=True, base=SMALL, recorder=None):
    """Train on the first `ranks` ranks of `pool`; return each rank's JobResult.

    Each rank enters `recorder(rank, trainer)` around its training.
    With `renewed = False` in the very processes that ran what was called before.
    """
    num_jobs[pool.num_ranks] += 1
    if renewed and num_jobs[pool.num_ranks] % MOST_JOBS == 0:
        pool.renew()
    settings = {**base, "job.dump_folder": str(folder)}
    for change in changes:
        settings.update(change)
    store = meeting_point()
    return pool.run(_train, ranks, store.port, flags_of(settings), recorder)[:ranks]


def keys_of(layout):
    """Return the settings that lay a job out so, by TOML key."""
    return {key: getattr(layout, name) for name, key in KEYS.items()}


def small_job(layout):
    """Return the settings of the small job on a layout."""
    sizes = {key: SMALL[key] for key in ("training.seq_len", "training.local_batch_size")}
    return keys_of(layout) | sizes | (PIPELINE if layout.pp > 1 else {})


def ranks_of(settings):
    """Return the number of ranks that the degrees in `settings` multiply to."""
    return math.prod(settings[KEYS[name]] for name in DEGREES)


def flags_of(settings):
    """Return torchtitan's command line for settings by TOML key; an empty list needs no flag."""
    lists = {k: ",".join(v) if isinstance(v, tuple) else v for k, v in settings.items() if v != ()}
    flags = [f"--{key}={value}" for key, value in lists.items() if not isinstance(value, bool)]
    flags += [f"--{key}" for key, value in settings.items() if value is True]
    return flags + [f"--{k.replace('.', '.no-', 1)}" for k, v in settings.items() if v is False]


def _train(rank, *args):
    worker = importlib.import_module("tests.integration.titan_worker")  # torchtitan, on the CPU
    return worker.train(rank, *args)
