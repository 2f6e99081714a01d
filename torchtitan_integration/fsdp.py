"""FSDP2 around blocks that are compiled whole, experts on a mesh of their own.

Contract
    FSDP2's hooks stand outside of every compiled graph. Experts are sharded on their own mesh
    (`efsdp` x `ep`), all else on `fsdp`, as torchtitan does; a parameter has one name, the model's.

torchtitan shards the experts as a module inside the block, whose hooks would break the block's
graph. Here they move outwards: a carrier module between block and compiled forward owns the
experts for FSDP, so they are gathered before the compiled code starts. Blocks that are one graph
are one unit of FSDP, and so are their carriers, which call each other.

FSDP2's reduce-scatter of float32 gradients with half the bytes: bfloat16 out, float32 sums.
Each rank's contribution is rounded once, after it has been accumulated, and the sum over
ranks is float32; so are the all-reduce over HSDP's replicas and all later steps.
No memory is taken beyond that of the float32 reduce-scatter but `STAGED` values and, on a
CPU, one more output.
A gradient reduced in another type than float32 goes the way torch sends it.

FSDP2 hands its buffers over on its reduce-scatter stream, and frees the input only after the work
of this stream: rounding, exchange and sum are all put there, in this order, and the input may be
overwritten.
"""

from __future__ import annotations

import datetime
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
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

from moe_compile.errors import ContractViolation
from moe_compile.ops.rounded_sum import round_in_place, sum_contributions
from torchtitan_integration.block_groups import block_groups
from torchtitan_integration.eight_bit_gathers import (
    gather_in_eight_bits,
    gathers_in_eight_bits,
    said_of_gathers,
)
from torchtitan_integration.job_config import options_of
from torchtitan_integration.meshes import expert_mesh

LOG: Final = logging.getLogger(__name__)


class ExpertCarrier(nn.Module):
    """Holds a block's experts for FSDP and runs the block's forward; adds no parameter name."""

    def __init__(self, experts: nn.Module, forward: Callable[..., Any]) -> None:
        """Take over `experts`; `forward` is the block's forward."""
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


def apply_fsdp(model: nn.Module, dims: ParallelDims, job: JobConfig, keeps_weights: bool) -> None:
    """Shard `model`, whole or a pipeline stage of it, over its data-parallel ranks.

    With `keeps_weights` none is gathered in eight bits.
    """
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
    if not keeps_weights:
        _choose_gathers(model, dims, job)
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


def _choose_gathers(model: nn.Module, dims: ParallelDims, job: JobConfig) -> None:
    """Have weights of experts gathered in eight bits, where all their products read them so."""
    args = model.model_args.moe_args
    if said := said_of_gathers(job, dims, args):
        LOG.info(said)
    if gathers_in_eight_bits(job, dims, args):
        for carrier in _carriers([*model.layers.values()]):
            gather_in_eight_bits(carrier.experts)


def _tail(model: nn.Module) -> list[nn.Module]:
    """Return the modules after the blocks; [] on a pipeline stage that is not the last."""
    has_tail = model.norm is not None and model.output is not None
    return [model.norm, model.output] if has_tail else []


def _expert_placement(
    num_experts: int, mesh: DeviceMesh, ep_degree: int
) -> Callable[..., Any] | None:
    """Return a placement on dim 1 when shards are more than experts, as torchtitan does."""
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


_REDUCE_SCATTER: Final[Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""Newer torch has the first name, and warns of the second."""


class RoundedReduceScatter:
    """Reduce-scatter for `FSDPModule.set_custom_reduce_scatter`."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer for FSDP2 to fill, or to read the result from."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce `input_tensor` over `group` into `output_tensor`; return a Work if `async_op`.

        The input's values are lost. With `async_op` the sum is made when the Work is waited for,
        on the stream that waits.
        """
        if input_tensor.dtype != torch.float32:
            return _REDUCE_SCATTER(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        scale = _scale(op, group.size())
        halves = round_in_place(input_tensor)
        launched = dist.all_to_all_single(
            halves.free, halves.rounded, group=group, async_op=async_op
        )

        def finish() -> None:
            sum_contributions(halves.free, output_tensor, scale)

        if async_op:
            return _SumWhenWaited(launched, finish)
        finish()
        return None


class _SumWhenWaited(dist.Work):
    """An exchange on its way, and the sum that is due after it."""

    def __init__(self, exchange: Any, finish: Callable[[], None]) -> None:
        super().__init__()
        self._exchange = exchange
        self._finish = finish
        self._is_done = False

    def is_completed(self) -> bool:
        """Return whether the sum has been made."""
        return self._is_done

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait for the exchange, then sum; 0 is the group's own timeout."""
        if not self._is_done:
            self._exchange.wait(timeout)
            self._finish()
            self._is_done = True
        return True


def _scale(op: Any, ranks: int) -> float:
    """Return the factor by which a reduction's result differs from a sum."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / ranks
    if op == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]  # the only way to read it; torch pickles operations so
        return float(factor)
    raise ContractViolation(f"gradient_wire: FSDP2 asked for reduction {op}, not sum or average")


def round_gradients(model: nn.Module) -> None:
    """Give every FSDP module of `model` the reduce-scatter of this file."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(RoundedReduceScatter())
