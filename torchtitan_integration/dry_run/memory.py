"""Bytes one GPU holds for a whole step: parameters, gradients, optimizer states, gathered blocks.

Contract
    All is counted from the sharded model itself. AdamW is taken to keep two states of the
    parameters' size. Of NCCL only the buffers of all-to-alls are in it, by published measurements
    on H100s; allocator and workspaces are not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_integration.block_groups import block_groups
from torchtitan_integration.dry_run.world import (
    FakeRank,
    kind_of_graph,
    stages_of,
)
from torchtitan_integration.job_config import options_of
from torchtitan_integration.meshes import exchange_buffers
from torchtitan_integration.parallelize import parallelize

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
        sizes.append(sum(_local_bytes(p, dtype) * _shards(p) for p in own.values()))
    policy = rank.job.parallelism.fsdp_reshard_after_forward
    keeps_all = policy == "never" or (policy == "default" and rank.dims.pp_enabled)
    return sum(sizes) if keeps_all else sum(sorted(sizes)[-2:])  # this graph and the next


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
