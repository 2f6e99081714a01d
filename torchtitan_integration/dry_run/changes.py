"""What to change in a job that does not fit in its GPU's memory, each change with its figure.

Contract
    Every figure is the difference of two dry runs, of the job as it is and with the change. Where a
    change leaves the graphs as they are, they are not traced again. A change that the recipe or
    torchtitan refuses is left out. Nothing of the job is changed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from moe_compile.config import ENVIRONMENT_PREFIX, MegaMoEConfig
from moe_compile.errors import InvalidConfig
from torchtitan_integration.dry_run.layers import Traced, Wanted, beside, options_of_graphs
from torchtitan_integration.dry_run.stages import Stages, measure_stages, trace_stages
from torchtitan_integration.dry_run.verdict import DeviceMemory, Helped
from torchtitan_integration.dry_run.world import FakeRank
from torchtitan_integration.job_checks import checked_ranks
from torchtitan_integration.job_config import options_of
from torchtitan_integration.job_file import JobFile
from torchtitan_integration.layout import BACKEND
from torchtitan_integration.meshes import CHANNELS, channels

FINE: Final = ("layernorm", "moe_act")
LATENTS: Final = (*FINE, "mla_up_proj")
"""Parts of a model whose results are large and take little time to compute again, as Megatron Core
names them (arXiv 2603.07685, section 4.1)."""
FEWER_CHANNELS: Final = 16
"""Channels of NCCL that a change asks for: half of those that it takes by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Other values of some keys of a job."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Key of the job -> value."""
    environment: Mapping[str, str] = field(default_factory=dict)
    times_ranks: int = 1
    """Factor on the number of ranks."""
    is_traced: bool = False
    """Whether graphs are others than before."""

    def said(self, world: int) -> str:
        """Return what to write, for a job of `world` ranks."""
        written = [f"{key} = {json.dumps(value)}" for key, value in self.settings.items()]
        written += [f"{name}={value}" for name, value in self.environment.items()]
        ranks = f" on {world * self.times_ranks} ranks" if self.times_ranks > 1 else ""
        return " with ".join(written) + ranks


def possible_changes(rank: FakeRank) -> list[Change]:
    """Return the changes that may help a job, whether they do or not."""
    return [
        *_checkpointing(rank, _options(rank)),
        *_of_graphs(rank, _options(rank)),
        *_batches(rank),
        *_degrees(rank),
    ]


def _options(rank: FakeRank) -> MegaMoEConfig:
    """Return our options as graphs and the recipe have them."""
    number = options_of(rank.job).blocks_per_graph
    return replace(options_of_graphs(rank.job), blocks_per_graph=number)


def _checkpointing(rank: FakeRank, options: MegaMoEConfig) -> Iterator[Change]:
    mode = "activation_checkpoint.mode"
    now = rank.job.activation_checkpoint.mode
    if now == "none":
        by_operator = {mode: "selective", "activation_checkpoint.selective_ac_option": "op"}
        yield Change(settings=by_operator, is_traced=True)
    if now != "full":
        yield Change(settings={mode: "full"}, is_traced=True)
    if now == "none" and not options.recompute_modules:
        for names in (FINE, LATENTS):
            yield Change(settings={"megamoe.recompute_modules": list(names)}, is_traced=True)
    if now != "none" and options.recompute == "save_exchanges" and options.equal_tokens:
        yield Change(settings={"megamoe.recompute": "model"}, is_traced=True)


def _of_graphs(rank: FakeRank, options: MegaMoEConfig) -> Iterator[Change]:
    if options.schedule and options.max_memory_increase:
        yield Change(settings={"megamoe.max_memory_increase": 0}, is_traced=True)
    if options.blocks_per_graph > 1:
        half = options.blocks_per_graph // 2
        yield Change(settings={"megamoe.blocks_per_graph": half}, is_traced=True)
    if rank.job.parallelism.fsdp_reshard_after_forward != "always":
        yield Change(settings={"parallelism.fsdp_reshard_after_forward": "always"})
    if channels() > FEWER_CHANNELS:
        yield Change(environment={CHANNELS: str(FEWER_CHANNELS)})


def _batches(rank: FakeRank) -> Iterator[Change]:
    """Halve the batch: of a pipeline, the number of microbatches or the size of one."""
    sequences = rank.job.training.local_batch_size
    if sequences > 1:
        yield Change(
            settings={"training.local_batch_size": sequences // 2},
            is_traced=not rank.dims.pp_enabled,
        )
    if rank.dims.pp_enabled and rank.batch > 1:
        key = "parallelism.pipeline_parallel_microbatch_size"
        yield Change(settings={key: rank.batch // 2}, is_traced=True)


def _degrees(rank: FakeRank) -> Iterator[Change]:
    degrees = {"data_parallel_shard": rank.dims.dp_shard, "pipeline_parallel": rank.dims.pp}
    for name, degree in degrees.items():
        if degree > 1:
            yield Change(settings={f"parallelism.{name}_degree": 2 * degree}, times_ranks=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class DryJob:
    """A job as a dry run has found it."""

    file: JobFile
    world: int
    """Number of its ranks."""
    stages: Stages
    traced: Sequence[Traced]
    device: DeviceMemory

    def most(self) -> int:
        """Return the bytes that the fullest rank needs."""
        return max(stage.total for stage in self.stages.memory(self.traced))


def try_changes(job: DryJob, changes: Sequence[Change], say: Callable[[str], None]) -> list[Helped]:
    """Return what each of the changes does to the fullest rank; `say` gets their names."""
    say(f"what to change: {', '.join(change.said(job.world) for change in changes)}")
    with beside([functools.partial(_try, job, change) for change in changes]) as results:
        return [one for one in results() if one is not None]


def _try(job: DryJob, change: Change) -> Helped | None:
    """Return what a change does; None where it is refused."""
    file, environment = _changed(job.file, change)
    world = job.world * change.times_ranks
    with _in_environment(environment):
        try:
            checked_ranks(file, world, is_run=False)
            stages = measure_stages(file, world, lambda _: None)
            known = {layer.kind for layer in job.traced}
            is_traced = change.is_traced or not known.issuperset(stages.graphs)
            traced = _trace(file, world, stages) if is_traced else job.traced
        except InvalidConfig:
            return None
    memory = stages.memory(traced)
    return Helped(
        change=change.said(job.world),
        saved=job.most() - max(stage.total for stage in memory),
        fits=job.device.left(memory) >= 0,
    )


def _trace(file: JobFile, world: int, stages: Stages) -> list[Traced]:
    return trace_stages(file, world, stages, lambda _: None, Wanted(has_times=False))


def _changed(file: JobFile, change: Change) -> tuple[JobFile, dict[str, str]]:
    """Return the job with a change, and the environment that the change needs.

    Where a file names no module for our table, our options are variables.
    """
    ours = f"{BACKEND}."
    has_table = bool(file.read("job.custom_config_module", ""))
    variables = {k: v for k, v in change.settings.items() if k.startswith(ours) and not has_table}
    flags = [
        f"--{key}={_written(value)}"
        for key, value in change.settings.items()
        if key not in variables
    ]
    named = {
        ENVIRONMENT_PREFIX + key.removeprefix(ours).upper(): _written(value)
        for key, value in variables.items()
    }
    changed = replace(file, overrides=(*file.overrides, *flags))
    return changed, {**change.environment, **named}


def _written(value: Any) -> str:
    """Return a value as flags and variables have it: lists with commas."""
    return ",".join(value) if isinstance(value, list) else str(value)


@contextlib.contextmanager
def _in_environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
