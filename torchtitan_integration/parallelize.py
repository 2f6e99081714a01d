"""Lay a torchtitan MoE model out so that a compile backend sees each block whole.

Contract
    Every transformer block is one forward and one backward graph, dispatch and experts included;
    FSDP2's hooks stand outside of it. Experts are sharded on their own mesh (`efsdp` x `ep`), all
    else on `fsdp`, as torchtitan does. Parameter names are the model's own.

torchtitan compiles the parts of a MoE block one by one, because it shards the experts as an inner
FSDP module whose hooks would break the graph. Here the hooks move outwards: a carrier module
between block and compiled forward owns the experts for FSDP, so they are gathered before the
compiled code starts.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
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
from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp

from moe_compile.config import PREFIX
from torchtitan_integration.job_config import compile_options
from torchtitan_integration.layout import check_degrees, check_settings

COPIES_OF_PARAMETERS: Final = 4
"""A parameter, its gradient, and AdamW's two moments."""


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


def parallelize(model: nn.Module, dims: ParallelDims, job: JobConfig) -> nn.Module:
    """Apply EP, compilation and FSDP2 to a torchtitan model; the `parallelize_fn` of our specs.

    Raises InvalidConfig for a layout this version does not have.
    """
    check_settings(lambda key, _: operator.attrgetter(key)(job))
    check_degrees(replicate=dims.dp_replicate, shard=dims.dp_shard)
    if dims.ep_enabled:
        apply_moe_ep_tp(
            model,
            tp_mesh=None,
            ep_mesh=dims.get_optional_mesh("ep"),
            etp_mesh=None,
            ep_etp_mesh=None,
        )
    compiles = job.compile.enable and "model" in job.compile.components
    held = _bytes_held(model, dims)
    for block in model.layers.values():
        forward = _compiled(block.forward, job, held) if compiles else block.forward
        if block.moe_enabled and dims.ep_enabled:
            block.expert_carrier = ExpertCarrier(block.moe.experts, forward)
            block.forward = block.expert_carrier.__call__
        else:
            block.forward = forward
    if dims.fsdp_enabled or dims.ep_enabled:
        _apply_fsdp(model, dims, job)
    return model


def _bytes_held(model: nn.Module, dims: ParallelDims) -> int:
    """Return the bytes of parameters, gradients and two optimizer states on one rank.

    A lower bound of the step's peak: saved activations come on top.
    """
    shards = max(1, dims.dp_shard * dims.cp)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return COPIES_OF_PARAMETERS * total // shards


def _compiled(forward: Callable[..., Any], job: JobConfig, held: int) -> Callable[..., Any]:
    backend = job.compile.backend
    options = None
    if backend == "megamoe":
        options = {PREFIX + "step_peak_bytes": held, **compile_options(job.megamoe)}
    torch._dynamo.config.capture_scalar_outputs = True  # as torchtitan's own apply_compile
    return torch.compile(forward, backend=backend, fullgraph=True, options=options)


def _apply_fsdp(model: nn.Module, dims: ParallelDims, job: JobConfig) -> None:
    replicate = ["dp_replicate"] if dims.dp_replicate_enabled else []
    settings: dict[str, Any] = {
        "mesh": dims.get_mesh([*replicate, "fsdp"]),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[job.training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[job.training.mixed_precision_reduce],
        ),
        "reshard_after_forward": job.parallelism.fsdp_reshard_after_forward != "never",
    }
    if job.training.enable_cpu_offload:
        settings["offload_policy"] = CPUOffloadPolicy()
    expert_mesh = dims.get_optional_mesh([*replicate, "efsdp"])

    fully_shard(model.tok_embeddings, **settings)
    for block in model.layers.values():
        experts: set[nn.Parameter] = set()
        if carrier := getattr(block, "expert_carrier", None):
            placement = _expert_placement(carrier.experts.num_experts, expert_mesh, dims.ep)
            fully_shard(carrier, **{**settings, "mesh": expert_mesh}, shard_placement_fn=placement)
            experts = set(carrier.experts.parameters())  # sharding made new ones
        fully_shard(block, **settings, ignored_params=experts)
    always = job.parallelism.fsdp_reshard_after_forward == "always"
    fully_shard([model.norm, model.output], **{**settings, "reshard_after_forward": always})
    fully_shard(model, **{k: v for k, v in settings.items() if k != "reshard_after_forward"})
    disable_fsdp_gradient_division(model)
    _prefetch(model)
    _adapt_to_gloo(model, settings["mesh"])


def _expert_placement(num_experts: int, mesh: Any, ep_degree: int) -> Callable[..., Any] | None:
    """Shard dim 1 when there are more shards than experts, as torchtitan does."""
    return (lambda _: Shard(1)) if mesh["efsdp"].size() * ep_degree > num_experts else None


def _prefetch(model: nn.Module) -> None:
    """Gather the next block's parameters while this one runs, in both directions."""
    blocks = [_fsdp_modules(block) for block in model.layers.values()]
    order = [[model.tok_embeddings], *blocks, [model.norm, model.output]]
    for here, following in itertools.pairwise(order):
        here[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(here)


def _fsdp_modules(block: nn.Module) -> list[nn.Module]:
    carrier = getattr(block, "expert_carrier", None)
    return [block] if carrier is None else [block, carrier]


def _adapt_to_gloo(model: nn.Module, mesh: Any) -> None:
    """Gloo cannot scale while it reduces; FSDP2's public switch makes it sum instead."""
    if dist.get_backend(mesh.get_group(mesh.ndim - 1)) != "gloo":
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
