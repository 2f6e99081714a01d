"""Whether a job fits in the memory of its GPU; if not, what to change, each change with its figure.

Contract
    The fullest rank decides. The job fits where its sum leaves `NOT_COUNTED` for what is not
    counted. Where the job states a skew, the sum is that of the rank with most rows.
    The figure of a change is the difference of two dry runs, of the job as it is and with the
    change. Where a change leaves the graphs as they are, they are not traced again. A change that
    the recipe or torchtitan refuses is left out. Nothing of the job is changed.
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
from moe_compile.hardware.profile import read_profile
from torchtitan_integration.dry_run.layers import Traced, Wanted, beside, options_of_graphs
from torchtitan_integration.dry_run.stages import StageMemory, Stages, measure_stages, trace_stages
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
GIB: Final = 2**30
NOT_COUNTED: Final = 5 * GIB
"""Assumed: CUDA's context and kernels 1, NCCL's other buffers 1, workspaces 1, a fragmented pool
2."""
MOST_CHANGES: Final = 3
"""Changes that a verdict names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of a GPU."""

    name: str
    """Name of the hardware profile."""
    total: int
    """Bytes of memory; 0 where the profile does not say."""

    def left(self, stages: Sequence[StageMemory]) -> int:
        """Return the bytes left on the fullest rank; below 0, those that are too much."""
        return self.total - NOT_COUNTED - max(stage.total for stage in stages)


def device_memory(hardware: str) -> DeviceMemory:
    """Return the memory of a GPU by its profile's name; data sheets say GB for GiB."""
    try:
        memory = read_profile(hardware).values.get("memory", {})
    except InvalidConfig:  # a profile that a function makes has no file
        memory = {}
    return DeviceMemory(name=hardware, total=int(memory.get("capacity_gb", 0.0) * GIB))


@dataclass(frozen=True, kw_only=True, slots=True)
class Helped:
    """A change to a job, and what it does to the fullest rank."""

    change: str
    """What to write."""
    saved: int
    """Bytes that the fullest rank needs less."""
    fits: bool
    """Whether the job fits with this change alone."""

    def __str__(self) -> str:
        """Return the change with its figure."""
        then = " (then it fits)" if self.fits else ""
        return f"{self.change}: {self.saved / GIB:.2f} GiB less{then}"


def skew_line(fullest: StageMemory) -> str:
    """Return what uneven routing means for the fullest rank."""
    busiest, more = fullest.busiest, fullest.more_rows / GIB
    if busiest.why_even:
        return f"All ranks have equally many rows: {busiest.why_even}."
    if not fullest.more_rows:
        return (
            f"Uneven routing changes no size that is counted on {fullest.place}: it has no block "
            "with experts, or its experts have a capacity, or rows have room of one size "
            '(host_reads = "none"), or tokens are all-gathered (dispatch = "all_gather"), and '
            "gathered rows are counted as even."
        )
    if not busiest.is_stated:
        return (
            "Routing is assumed even (megamoe.routing_skew = 0). If one rank gets twice its rows "
            f"in every layer, it needs {more:.2f} GiB more: {fullest.even / GIB + more:.2f} GiB "
            f"on {fullest.place}."
        )
    return (
        f"megamoe.routing_skew = {busiest.skew:g}: the rank with most rows has {busiest.times:.2f} "
        "times as many as with even routing, the same rank in every layer. They take "
        f"{more:.2f} GiB more: {fullest.total / GIB:.2f} GiB on {fullest.place}, "
        f"{fullest.even / GIB:.2f} GiB with even routing."
    )


def verdict(device: DeviceMemory, stages: Sequence[StageMemory], helped: Sequence[Helped]) -> str:
    """Return whether the job fits, by how much, and the changes that help most where it does not.

    `helped` are all changes that were looked at.
    """
    fullest, capacity = max(stages, key=lambda stage: stage.total), f"{device.total / GIB:g} GB"
    where, kept = f"the fullest rank ({fullest.place})", f"{NOT_COUNTED / GIB:.0f} GiB"
    if not device.total:
        return (
            f"not known whether it fits: the fullest rank ({fullest.place}) needs "
            f"{fullest.total / GIB:.2f} GiB and {kept} for what is not counted, and profile "
            f"{device.name!r} names no memory; write capacity_gb in its table [memory]"
        )
    left = device.left(stages)
    beside = f"{kept} are kept for CUDA, workspaces, NCCL's other buffers and the allocator"
    if left >= 0:
        return f"fits in {capacity}: {left / GIB:.2f} GiB left on {where}; {beside}"
    said = f"does not fit in {capacity}: {-left / GIB:.2f} GiB too much on {where}; {beside}."
    best = most_helpful(helped)
    if not best:
        return f"{said} No change of a single key was found that helps."
    return f"{said} These changes help most, each by itself: {'; '.join(map(str, best))}."


def most_helpful(helped: Sequence[Helped]) -> list[Helped]:
    """Return the changes that save most, the largest first."""
    useful = [one for one in helped if one.saved / GIB >= 0.005]  # less is printed as 0.00
    return sorted(useful, key=lambda one: -one.saved)[:MOST_CHANGES]


def memory_report(
    device: DeviceMemory, stages: Sequence[StageMemory], helped: Sequence[Helped]
) -> dict[str, Any]:
    """Return the table, the verdict and the changes as data, in bytes."""
    fullest = max(stages, key=lambda stage: stage.total)
    left = device.left(stages) if device.total else None
    return {
        "capacity": device.total or None,
        "kept_for_what_is_not_counted": NOT_COUNTED,
        "fits": None if left is None else left >= 0,
        "left_on_fullest_rank": left,
        "fullest_rank": fullest.name,
        "routing_skew": fullest.busiest.skew,
        "rows_of_busiest_rank_over_even": fullest.busiest.times,
        "rows_are_even_because": fullest.busiest.why_even,
        "ranks": [stage.as_json() for stage in stages],
        "changes": [{"change": one.change, "saved": one.saved, "fits": one.fits} for one in helped],
    }


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
