"""The memory of one GPU of each pipeline stage: the model's state, and activations of its graphs.

Contract
    The state, parameters, gradients, optimizer states and gathered blocks, is counted from the
    sharded model itself. AdamW is taken to keep two states of the parameters' size. Of NCCL only
    the buffers of all-to-alls are in it, by published measurements on H100s; allocator and
    workspaces are not.
    The peak inside a graph is that of the order that the schedule chose, so what the schedule adds
    is in it. Graphs are traced as on the first rank. A rank that holds more allows its schedule
    more: that difference is added in full.
    The peak of a graph counts beside what all graphs save, whenever it is reached: the sum is an
    upper bound.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP

from moe_compile.errors import InvalidConfig
from torchtitan_integration.block_groups import block_groups
from torchtitan_integration.dry_run.activations import Activations, BusiestRank, busiest_rank
from torchtitan_integration.dry_run.layers import (
    Traced,
    Wanted,
    options_of_graphs,
    trace_layers,
)
from torchtitan_integration.dry_run.world import (
    FakeRank,
    fake_rank,
    graphs_of,
    kind_of_graph,
    stages_of,
)
from torchtitan_integration.eight_bit_gathers import (
    bytes_of,
    gathers_in_eight_bits,
    weights_of,
)
from torchtitan_integration.job_config import options_of
from torchtitan_integration.job_file import JobFile, first_ranks_of_stages
from torchtitan_integration.meshes import exchange_buffers
from torchtitan_integration.parallelize import parallelize

PEAK: Final = "peak inside one block"
MAY_ADD: Final = "the schedule may add"
"""A row that is left out where it is 0 on all ranks."""


Graphs = Sequence[tuple[Activations, int]]
"""Activations of each kind of graph on a rank, and the number of its graphs."""
OPTIMIZER_STATES: Final = 2
"""States of AdamW per parameter."""
LOGIT_COPIES: Final = 2
"""Copies of logits: the loss reads them in fp32, and its gradient has their size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelState:
    """Bytes of the model that one GPU keeps for a whole step, and the blocks it has."""

    parameters: int
    gathered: int
    """Blocks FSDP holds whole at once, in the type of compute: those of two graphs, or all of them
    where they are not resharded after the forward."""
    graphs: dict[str, int]
    """Number of compiled graphs of each kind, of a block or several."""
    microbatches: float
    """Number of microbatches whose activations this GPU keeps at once."""
    logits: int
    """Logits of a microbatch and their gradient; 0 without the last projection on this GPU."""
    exchange_buffers: int
    """NCCL's buffers of the groups on which rows and heads are exchanged."""

    @property
    def held(self) -> int:
        """Bytes of parameters, gradients and optimizer states together."""
        return (2 + OPTIMIZER_STATES) * self.parameters


def laid_out(rank: FakeRank) -> list[nn.Module]:
    """Return the stages of the model on this rank as training lays them out, on the meta device."""
    job = copy.deepcopy(rank.job)
    job.compile.enable = False
    return stages_of(rank, job, parallelize)


def measure_state(rank: FakeRank, parts: Sequence[nn.Module]) -> ModelState:
    """Count the bytes of the stages of the model on this rank."""
    parameters = [p for part in parts for p in part.parameters()]
    groups = [blocks for part in parts for blocks in block_groups(part, rank.job)]
    kinds = [kind_of_graph(blocks) for blocks in groups]
    has_output = any(part.output is not None for part in parts)
    return ModelState(
        parameters=sum(_local_bytes(p, p.dtype) for p in parameters),
        gathered=_gathered(rank, groups),
        graphs={kind: kinds.count(kind) for kind in kinds},
        microbatches=microbatches_in_flight(rank, len(parts)),
        logits=_logit_bytes(rank) if has_output else 0,
        exchange_buffers=exchange_buffers(rank.dims, options_of(rank.job)),
    )


def microbatches_in_flight(rank: FakeRank, num_stages: int) -> float:
    """Return the number of microbatches whose activations a GPU with `num_stages` stages keeps.

    The one in work and those of the warm-up, counted in stages as torch's schedules do
    (`torch/distributed/pipelining/schedules.py`): 1F1B, or Interleaved1F1B with more stages.
    """
    if not rank.dims.pp_enabled:
        return 1
    degrees = rank.job.parallelism
    available = rank.job.training.local_batch_size // degrees.pipeline_parallel_microbatch_size
    following = rank.dims.pp - 1 - rank.dims.get_mesh("pp").get_local_rank()
    if num_stages == 1:
        return min(available, following + 1)
    warm_up = (num_stages - 1) * rank.dims.pp + 2 * following
    return min(available, (warm_up + 1) / num_stages)


def _local_bytes(parameter: nn.Parameter, dtype: torch.dtype) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * dtype.itemsize


def _gathered(rank: FakeRank, groups: Iterable[Sequence[nn.Module]]) -> int:
    dtype = TORCH_DTYPE_MAP[rank.job.training.mixed_precision_param]
    sizes = []
    for blocks in groups:
        own = {id(p): p for b in blocks for p in b.parameters()}  # experts have two ways in
        small = [w for block in blocks for w in _in_eight_bits(rank, block)]
        large = [p for p in own.values() if all(p is not w for w in small)]
        size = sum(_local_bytes(p, dtype) * _shards(p) for p in large)
        sizes.append(size + sum(bytes_of(w.to_local().shape) * _shards(w) for w in small))
    policy = rank.job.parallelism.fsdp_reshard_after_forward
    keeps_all = policy == "never" or (policy == "default" and rank.dims.pp_enabled)
    return sum(sizes) if keeps_all else sum(sorted(sizes)[-2:])  # this graph and the next


def _in_eight_bits(rank: FakeRank, block: nn.Module) -> list[nn.Parameter]:
    """Return the weights of a block that FSDP gathers in eight bits, whole experts on a rank."""
    gathers = block.moe_enabled and gathers_in_eight_bits(
        rank.job, rank.dims, rank.model_args.moe_args
    )
    return [*weights_of(block.moe.experts).values()] if gathers else []


def _shards(parameter: nn.Parameter) -> int:
    """Return the number of ranks over which FSDP has sharded a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return next((mesh.size(i) for i, axis in enumerate(mesh.mesh_dim_names) if "fsdp" in axis), 1)


def _logit_bytes(rank: FakeRank) -> int:
    settings = rank.job.training
    rows = rank.batch * settings.seq_len // rank.dims.cp
    dtype = TORCH_DTYPE_MAP[settings.mixed_precision_param]
    per_logit = dtype.itemsize + LOGIT_COPIES * torch.float32.itemsize
    return rows * rank.model_args.vocab_size * per_logit // rank.dims.tp


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """The memory of one GPU by use, of the rank with most rows where a skew is stated."""

    name: str
    """Name of the rank."""
    place: str
    """Name of the rank with its place in the pipeline."""
    state: ModelState
    activations: int
    """Saved from forward to backward, for all microbatches in flight, with even routing."""
    peak_in_block: int
    """Largest live bytes inside one block's graph beyond what it saves, with even routing."""
    rebuilt: int
    """Part of this peak at most: activations that the backward computes again."""
    added: int
    """Part of this peak: added by the schedule."""
    may_add: int
    """Bytes that the schedule may add beyond this peak: on this rank it is allowed more than where
    the graphs were traced."""
    busiest: BusiestRank
    more_rows: int
    """Bytes that its rows take beyond those of even routing on the busiest rank."""

    def rows(self) -> dict[str, int]:
        """Return bytes by use, with even routing."""
        return {
            "parameters": self.state.parameters,
            "gradients": self.state.parameters,
            "optimizer (AdamW)": OPTIMIZER_STATES * self.state.parameters,
            "blocks gathered by FSDP": self.state.gathered,
            "saved activations": self.activations,
            PEAK: self.peak_in_block,
            MAY_ADD: self.may_add,
            "logits and their gradient": self.state.logits,
            "NCCL, all-to-all": self.state.exchange_buffers,
        }

    def parts_of_peak(self) -> dict[str, int]:
        """Return parts of the peak inside one block, which are in `rows` already."""
        return {"of it, computed again": self.rebuilt, "of it, by the schedule": self.added}

    @property
    def even(self) -> int:
        """Bytes of all uses together, with even routing."""
        return sum(self.rows().values())

    @property
    def total(self) -> int:
        """Bytes of all uses together, under the skew that the job states."""
        return self.even + (self.more_rows if self.busiest.is_stated else 0)

    def as_json(self) -> dict[str, Any]:
        """Return the figures by plain names, in bytes."""
        return {
            "rank": self.name,
            "place": self.place,
            "microbatches_in_flight": self.state.microbatches,
            "parameters": self.state.parameters,
            "gradients": self.state.parameters,
            "optimizer_state": OPTIMIZER_STATES * self.state.parameters,
            "gathered_blocks": self.state.gathered,
            "saved_activations": self.activations,
            "peak_in_block": self.peak_in_block,
            "computed_again_in_backward": self.rebuilt,
            "added_by_schedule": self.added,
            "schedule_may_add": self.may_add,
            "logits": self.state.logits,
            "nccl_buffers": self.state.exchange_buffers,
            "more_rows_on_busiest_rank": self.more_rows,
            "sum_with_even_routing": self.even,
            "sum": self.total,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """The model on one rank of each pipeline stage of a job."""

    names: tuple[str, ...]
    states: tuple[ModelState, ...]
    graphs: dict[str, tuple[str, ...]]
    """Kind of a graph -> names of the blocks of the first one."""
    busiest: BusiestRank
    schedule_share: float
    """Share of what a rank holds by which the schedule may raise the peak."""

    @property
    def step_peak_bytes(self) -> int:
        """The option of this name with which graphs are traced: that of the first rank."""
        return self.states[0].held + self.states[0].exchange_buffers

    def memory(self, traced: Sequence[Traced]) -> list[StageMemory]:
        """Return the memory of each rank, with the activations of its graphs."""
        return [self._of_stage(number, traced) for number in range(len(self.states))]

    def _of_stage(self, number: int, traced: Sequence[Traced]) -> StageMemory:
        name, state, num = self.names[number], self.states[number], len(self.names)
        own = [layer for layer in traced if layer.kind in state.graphs]
        even, busiest = (
            [(getattr(layer, routing), state.graphs[layer.kind]) for layer in own]
            for routing in ("even", "busiest")
        )
        fullest = max(own, key=lambda layer: layer.even.peak, default=None)
        held = state.held + state.exchange_buffers
        return StageMemory(
            name=name,
            place=f"{name}, pipeline stage {number + 1} of {num}" if num > 1 else name,
            state=state,
            activations=_saved(even, state.microbatches),
            peak_in_block=fullest.even.peak if fullest else 0,
            rebuilt=max((layer.even.rebuilt for layer in own), default=0),
            added=fullest.added_by_schedule() if fullest else 0,
            may_add=int(self.schedule_share * max(0, held - self.step_peak_bytes)),
            busiest=self.busiest,
            more_rows=_held(busiest, state.microbatches) - _held(even, state.microbatches),
        )


def measure_stages(file: JobFile, world: int, begin: Callable[[FakeRank], None]) -> Stages:
    """Return the model on the first rank of each pipeline stage.

    `begin` is called with the first of these ranks. Raises InvalidConfig for a refused layout.
    """
    states: dict[str, ModelState] = {}
    graphs: dict[str, tuple[str, ...]] = {}
    for number in first_ranks_of_stages(file, world):
        with fake_rank(file, world, number) as rank, refusals(file):
            if number == 0:
                begin(rank)
                busiest, share = busiest_rank(rank), _schedule_share(rank)
            parts = laid_out(rank)
            graphs |= graphs_of(parts, rank.job)
            states[f"rank {number}"] = measure_state(rank, parts)
    return Stages(
        names=tuple(states),
        states=tuple(states.values()),
        graphs=graphs,
        busiest=busiest,
        schedule_share=share,
    )


def trace_stages(
    file: JobFile, world: int, stages: Stages, say: Callable[[str], None], wanted: Wanted
) -> list[Traced]:
    """Trace one graph of each kind of the stages of a job; `say` gets the name of the next one."""
    with fake_rank(file, world, 0) as rank:
        return trace_layers(rank, stages.graphs, stages.step_peak_bytes, say, wanted)


@contextlib.contextmanager
def refusals(file: JobFile) -> Iterator[None]:
    """Name the job's file in errors by which torch and torchtitan refuse it."""
    try:
        yield
    except (NotImplementedError, ValueError) as error:  # raised for a refused layout
        raise InvalidConfig(f"{file.path}: this layout cannot be made: {error}") from error


def _schedule_share(rank: FakeRank) -> float:
    """Return the share of what a rank holds that its schedule may add; 0 where that is no matter.

    A job that names `step_peak_bytes` allows every rank as much.
    """
    options = options_of_graphs(rank.job)
    allows_more = options.schedule and not options.step_peak_bytes
    return options.max_memory_increase if allows_more else 0.0


def _saved(graphs: Graphs, microbatches: float) -> int:
    return int(sum(one.kept * number for one, number in graphs) * microbatches)


def _held(graphs: Graphs, microbatches: float) -> int:
    """Return what is saved, and the largest peak inside a graph."""
    return _saved(graphs, microbatches) + max((one.peak for one, _ in graphs), default=0)


def first_most_last(stages: Sequence[StageMemory]) -> list[StageMemory]:
    """Return the first and the last of `stages`, and of those between the one that holds most."""
    first, *between = stages
    last = [between.pop()] if between else []
    most = max(between, key=lambda stage: stage.total, default=None)
    return [first, *([most] if most else []), *last]
