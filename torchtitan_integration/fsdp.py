"""FSDP2 around blocks that are compiled whole, experts on a mesh of their own.

Contract
    FSDP2's hooks stand outside of every compiled graph. Experts are sharded on their own mesh
    (`efsdp` x `ep`), all else on `fsdp`, as torchtitan does; a parameter has one name, the model's.

torchtitan shards the experts as a module inside the block, whose hooks would break the block's
graph. Here they move outwards: a carrier module between block and compiled forward owns the
experts for FSDP, so they are gathered before the compiled code starts. Blocks that are one graph
are one unit of FSDP, and so are their carriers, which call each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.infra.parallelize import disable_fsdp_gradient_division

from torchtitan_integration.block_groups import block_groups
from torchtitan_integration.expert_mesh import expert_mesh
from torchtitan_integration.gradient_wire import round_gradients
from torchtitan_integration.job_config import options_of


class ExpertCarrier(nn.Module):
    """Holds a block's experts for FSDP and runs the block's forward; adds no parameter name."""

    def __init__(self, experts: nn.Module, forward: Callable[..., Any]) -> None:
        """Take over `experts`; `forward` is what the block does when called."""
        super().__init__()
        self.experts = experts
        self._forward = forward
        self.register_state_dict_post_hook(_drop_own_names)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block with its experts gathered."""
        return self._forward(*args, **kwargs)


def _drop_own_names(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Leave the experts in the state dict under the block's own names only."""
    del module, metadata
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]


def apply_fsdp(model: nn.Module, dims: ParallelDims, job: JobConfig) -> None:
    """Shard `model`, whole or a pipeline stage of it, over its data-parallel ranks."""
    replicate = ["dp_replicate"] if dims.dp_replicate_enabled else []
    policy = job.parallelism.fsdp_reshard_after_forward
    reshards = policy == "always" or (policy == "default" and not dims.pp_enabled)
    shared: dict[str, Any] = {
        "mesh": dims.get_mesh([*replicate, "fsdp"]),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[job.training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[job.training.mixed_precision_reduce],
        ),
    }
    if job.training.enable_cpu_offload:
        shared["offload_policy"] = CPUOffloadPolicy()
    settings = {**shared, "reshard_after_forward": reshards}

    if model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, **settings)
    experts_mesh = expert_mesh(dims, [*replicate, "efsdp"])
    for blocks in block_groups(model, job):
        experts: set[nn.Parameter] = set()
        if carriers := _carriers(blocks):
            placement = _expert_placement(carriers[0].experts.num_experts, experts_mesh, dims.ep)
            of_experts = {**settings, "mesh": experts_mesh, "shard_placement_fn": placement}
            fully_shard(carriers, **of_experts)
            experts = {p for c in carriers for p in c.experts.parameters()}  # new ones by sharding
        fully_shard(blocks, **settings, ignored_params=experts)
    if tail := _tail(model):  # gathered again at once in backward: kept, unless asked otherwise
        fully_shard(tail, **{**settings, "reshard_after_forward": policy == "always"})
    fully_shard(model, **shared)
    disable_fsdp_gradient_division(model)
    _prefetch(model, job)
    adapt_to_gloo(model)
    if options_of(job).gradient_wire == "bf16_fp32_sum":
        round_gradients(model)


def _tail(model: nn.Module) -> list[nn.Module]:
    """Return what follows the blocks; [] on a pipeline stage that is not the last."""
    has_tail = model.norm is not None and model.output is not None
    return [model.norm, model.output] if has_tail else []


def _expert_placement(
    num_experts: int, mesh: DeviceMesh, ep_degree: int
) -> Callable[..., Any] | None:
    """Shard dim 1 when there are more shards than experts, as torchtitan does."""
    return (lambda _: Shard(1)) if mesh["efsdp"].size() * ep_degree > num_experts else None


def _prefetch(model: nn.Module, job: JobConfig) -> None:
    """Gather the next graph's parameters while this one runs, in both directions."""
    head = [[model.tok_embeddings]] if model.tok_embeddings is not None else []
    blocks = [[group[0], *_carriers(group)[:1]] for group in block_groups(model, job)]
    tail = [_tail(model)] if _tail(model) else []
    for here, following in itertools.pairwise([*head, *blocks, *tail]):
        here[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(here)


def _carriers(blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the carriers of the blocks that have experts, in the order in which they run."""
    return [block.expert_carrier for block in blocks if hasattr(block, "expert_carrier")]


def adapt_to_gloo(model: nn.Module) -> None:
    """Gloo cannot scale while it reduces; FSDP2's public switch makes it sum instead."""
    if dist.get_backend() != "gloo":
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
