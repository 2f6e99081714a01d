"""Section `recipes`: training jobs of small models, as the model is written and compiled.

Contract
    A job is that of the debug recipe with another model or layout, on all ranks, each a process of
    its own: torchtitan's trainer makes its groups itself. It runs twice over the same batches from
    the same weights, not compiled and by megamoe, which must rewrite what holds experts. Losses and
    gradient norms are those that torchtitan prints. Under TP the job that is not compiled has
    torchtitan's layout, whose gates have part of a gradient (docs/layouts.md): half a percent of a
    norm.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

import torchtitan_integration
from benchmarks.node.sizes import Sizes
from moe_compile.check.limited_process import run_limited
from moe_compile.check.ranks import OF_AGENT
from moe_compile.check.sections import Record
from moe_compile.check.team import Team
from moe_compile.testing.process_groups import rank_device
from moe_compile.testing.rank_pool import meeting_point
from torchtitan_integration.launch import RANK

FILE: Final = (
    Path(torchtitan_integration.__file__).parent / "configs" / "deepseek_v3_debug_cpu.toml"
)
STEP: Final = re.compile(r"step:\s+(\d+)\s+loss:\s+(\S+)\s+grad_norm:\s+(\S+)")
TRAINERS: Final = {"cpu": "torchtitan_integration.cpu_launcher", "cuda": "torchtitan.train"}
EXPERTS: Final = 8
"""Of the small models."""
STEPS: Final = 5
MOST_OFF: Final = 0.02
"""Of a loss, or of a gradient's norm: Inductor rounds otherwise than the model as written."""
Printed = Mapping[int, tuple[float, ...]]
"""Step -> loss and gradient norm."""
JOB_S: Final = 240.0
"""What one job may take, its compilation too; then it is ended."""
AS_WRITTEN: Final = "--compile.no-enable"
STRICT: Final = "--megamoe.strict"
PARTS: Final = {"batch_parts": 2, "numerics": "bounded"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A shipped recipe in small: what its job has besides the debug recipe's."""

    model: str = "deepseek_v3"
    options: Mapping[str, Any] | None = None
    """Of megamoe; two chunks where none are stated."""
    tensor_parallel: int = 1
    least_ranks: int = 2

    def flags(self, num_ranks: int) -> dict[str, Any]:
        """Return the job's settings on so many ranks."""
        options = {"chunks": 2} if self.options is None else self.options
        return {
            "model.name": self.model,
            "training.steps": STEPS,
            "parallelism.data_parallel_shard_degree": num_ranks // self.tensor_parallel,
            "parallelism.tensor_parallel_degree": self.tensor_parallel,
            "parallelism.expert_parallel_degree": math.gcd(num_ranks, EXPERTS),
            "megamoe.report": "",
            **{f"megamoe.{name}": value for name, value in options.items()},
        }


RECIPES: Final[Mapping[str, Recipe]] = {
    "DeepSeek-V3": Recipe(),
    "DeepSeek-V3, blocks in parts": Recipe(options={**PARTS, "blocks_per_graph": 2}),
    "DeepSeek-V3, tensor parallel": Recipe(tensor_parallel=2, least_ranks=4),
    "DeepSeek-V3, two hops": Recipe(options={"chunks": 2, "nodes": "exact", "node_ranks": 2},
                                    least_ranks=4),
    "Qwen3": Recipe(model="qwen3"),
    "gpt-oss": Recipe(model="gpt_oss"),
    "Llama 4": Recipe(model="llama4"),
}  # fmt: skip


def check_recipes(team: Team, sizes: Sizes, out: Path) -> None:
    """Run the section; what jobs print goes to the folder `out`."""
    for name in sizes.recipes or RECIPES:
        recipe = RECIPES[name]
        if team.num_ranks < recipe.least_ranks:
            if team.record is not None:
                why = f"needs {recipe.least_ranks} ranks, here are {team.num_ranks}"
                team.record.skip(name, why)
            continue
        work = partial(_train_twice, name, recipe, sizes, out)
        team.run(name, work, partial(judge_losses, name), needs_s=2 * sizes.compile_s)


def judge_losses(name: str, record: Record, found: list[dict[str, Any]]) -> None:
    """Record a recipe's losses; a failure where they are not those of the model as written."""
    first = found[0]
    record.add_row({"recipe": name, **first})
    record.expect(first["steps"] == STEPS, name, f"{first['steps']} of {STEPS} steps in both jobs")
    most = max(one["most_off"] for one in found)
    record.expect(most <= MOST_OFF, name, f"a loss or a norm is off by {most:.4f}")


def _train_twice(name: str, recipe: Recipe, sizes: Sizes, out: Path) -> dict[str, Any]:
    """Return the losses of both jobs, and by how much loss or norm differ at most."""
    settings = recipe.flags(dist.get_world_size())
    if sizes.device == "cpu":
        settings["megamoe.codegen"] = "fx"  # Inductor takes minutes there
    began = time.monotonic()
    folder = out / "recipes" / name.replace(" ", "_")
    flags = [f"--{key}={value}" for key, value in settings.items()]
    written = _train([*flags, AS_WRITTEN], sizes, folder / "as_written")
    compiled = _train([*flags, STRICT], sizes, folder / "compiled")
    return {
        "steps": len(written.keys() & compiled.keys()),
        "losses": [compiled[step][0] for step in sorted(compiled)],
        "as_written": [written[step][0] for step in sorted(written)],
        "most_off": most_off(compiled, written),
        "seconds": time.monotonic() - began,
    }


def most_off(ours: Printed, theirs: Printed) -> float:
    """Return by which share a number differs at most; inf where one is no number, or none is there.

    Of steps that both jobs printed.
    """
    pairs = [
        pair for n in ours.keys() & theirs.keys() for pair in zip(ours[n], theirs[n], strict=True)
    ]
    if not all(map(math.isfinite, itertools.chain.from_iterable(pairs))):
        return math.inf
    return max((abs(a - b) / abs(b) for a, b in pairs), default=math.inf)


def _train(flags: Sequence[str], sizes: Sizes, folder: Path) -> Printed:
    """Train as this rank; return loss and norm by step. Raises RuntimeError when a job fails."""
    rank = dist.get_rank()
    store = meeting_point() if rank == 0 else None  # of the job's ranks, while it runs
    port = _told_by_first(store.port if store is not None else 0)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"rank{rank}.log"
    command = [sys.executable, "-m", RANK, TRAINERS[sizes.device], f"--job.config_file={FILE}"]
    command += [f"--job.dump_folder={folder}", *flags]
    environment = {**os.environ, "MASTER_PORT": str(port), OF_AGENT: str(True)}
    code = run_limited(command, log, JOB_S, environment, keeps_output=True)
    if code != 0:
        raise RuntimeError(f"a job ended with {code}: see {folder}")
    return {
        int(step): (float(a), float(b))
        for step, a, b in STEP.findall(log.read_text(errors="replace"))
    }


def _told_by_first(number: int) -> int:
    """Return the first rank's number on all."""
    told = torch.tensor([number], device=rank_device())
    dist.broadcast(told, src=0)
    return int(told)
