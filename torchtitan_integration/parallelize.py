"""Lay a torchtitan MoE model out so that a compile backend sees each block whole.

Contract
    Every transformer block, or group of blocks, is one forward and one backward graph: dispatch,
    experts, tensor parallelism and activation checkpointing included. The rest of the layout is
    torchtitan's own, by its functions in its order.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import apply_ddp

from moe_compile.config import PREFIX
from moe_compile.recompute.policies import LEAST
from moe_compile.runtime.agree_on_machine import agree_on_machines
from moe_compile.torch_quirks.aot_cache_allowlist import cacheable_functions
from torchtitan_integration.block_groups import block_groups, forward_of, run_as_group
from torchtitan_integration.fsdp import ExpertCarrier, apply_fsdp
from torchtitan_integration.job_config import compile_options, option_of, options_of, report_path
from torchtitan_integration.layout import BACKEND, BY_BUDGET, check_layout, of_model, read_layout
from torchtitan_integration.meshes import (
    connect_exchanges,
    exchange_buffers,
    expert_shards,
    register_nodes,
    sequence_mesh,
)
from torchtitan_integration.model_parts import ModelParts, parts_of
from torchtitan_integration.ulysses import apply_ulysses

LOG: Final = logging.getLogger(__name__)
COPIES_OF_PARAMETERS: Final = 4
"""A parameter, its gradient, and AdamW's two moments."""


Forward = Callable[..., Any]
Compile = Callable[[Forward, str, Mapping[str, Any] | None], Forward]
"""Returns a forward compiled by a backend with options."""


def compile_whole(forward: Forward, backend: str, options: Mapping[str, Any] | None) -> Forward:
    """Return `forward` as one graph, compiled at its first call."""
    given = None if options is None else dict(options)
    return torch.compile(forward, backend=backend, fullgraph=True, options=given)


def parallelize(
    model: nn.Module,
    dims: ParallelDims,
    job: JobConfig,
    compile_forward: Compile = compile_whole,
    *,
    keeps_weights: bool = False,
) -> nn.Module:
    """Lay out a model, or a pipeline stage of it; the `parallelize_fn` of our train specs.

    With `keeps_weights` FSDP2 gathers them in sixteen bits: others than megamoe read them too.

    Raises InvalidConfig for a layout this version does not have.
    """
    layout = read_layout(lambda key, _: _value(job, key))
    layout = of_model(dataclasses.replace(layout, dp_shard=dims.dp_shard), model.model_args)
    check_layout(layout)
    agree_on_machines()
    apply_model_parallelism(model, dims, job, compile_forward)
    announce_first_calls(block_groups(model, job))
    apply_data_parallelism(model, dims, job, keeps_weights)
    return model


def _value(job: JobConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return option_of(job, name) if section == BACKEND else getattr(getattr(job, section), name)


def apply_model_parallelism(
    model: nn.Module,
    dims: ParallelDims,
    job: JobConfig,
    compile_forward: Compile = compile_whole,
) -> None:
    """Apply TP, EP, CP and activation checkpointing, then compile each block."""
    parts = parts_of(job.model.name)
    parts.prepare_experts(model)
    if dims.tp_enabled:
        parts.apply_tp(
            model,
            dims.get_mesh("tp"),
            loss_parallel=not job.parallelism.disable_loss_parallel,
            has_cp=dims.cp_enabled,
        )
        if model.tok_embeddings is not None:
            model.tok_embeddings.register_forward_hook(_waited)
    if dims.tp_enabled or dims.ep_enabled:
        forgets = option_of(job, "host_reads") == "none"
        parts.apply_experts(model, dims, forgets_splits=forgets)
    if dims.cp_enabled:
        apply_ulysses(model.layers.values(), sequence_mesh(dims), job)
    register_nodes(dims, options_of(job))
    connect_exchanges(dims)
    compiles = job.compile.enable and "model" in job.compile.components
    if job.activation_checkpoint.mode != "none":
        _apply_checkpointing(model, job, parts, compiles=compiles)
    held = bytes_held(model, dims) + exchange_buffers(dims, options_of(job))
    for blocks in block_groups(model, job):
        forward = forward_of(blocks)
        forward = compile_forward(forward, *_backend(job, held)) if compiles else forward
        run_as_group(blocks, _carried(blocks, forward) if dims.ep_enabled else forward)


def _carried(blocks: Sequence[nn.Module], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` with the experts of all `blocks` in carriers around it."""
    for block in reversed(blocks):
        if block.moe_enabled:
            block.expert_carrier = ExpertCarrier(block.moe.experts, forward)
            forward = block.expert_carrier.__call__
    return forward


def announce_first_calls(groups: Iterable[Sequence[nn.Module]]) -> None:
    """Have each group of blocks log its first call, in which it is compiled."""
    groups = list(groups)
    total = sum(len(blocks) for blocks in groups)

    def announce(which: str, handles: list[Any]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            handles.pop().remove()
            LOG.info("compiling %s of %d", which, total)

        return hook

    number = 0
    for blocks in groups:
        first, number = number + 1, number + len(blocks)
        which = f"block {first}" if first == number else f"blocks {first} to {number}"
        handles: list[Any] = []
        handles.append(blocks[0].register_forward_pre_hook(announce(which, handles)))


def apply_data_parallelism(
    model: nn.Module, dims: ParallelDims, job: JobConfig, keeps_weights: bool
) -> None:
    """Apply FSDP2; or DDP, where there are replicas and nothing else."""
    if dims.fsdp_enabled or dims.ep_enabled:
        apply_fsdp(model, dims, job, keeps_weights)
    elif dims.dp_replicate_enabled:
        apply_ddp(model, dims.get_mesh("dp_replicate"), enable_compile=False)


def _waited(module: nn.Module, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
    """Return `embedded` after its reduce-scatter.

    torch's AOTAutograd takes a collective still on its way for an input without gradient (torch
    issue 191113): entering the first compiled block, the embedding would silently stop training.
    """
    del module, inputs
    return embedded.clone()


def _apply_checkpointing(
    model: nn.Module, job: JobConfig, parts: ModelParts, *, compiles: bool
) -> None:
    apply_ac(
        model,
        job.activation_checkpoint,
        model_compile_enabled=compiles,
        op_sac_save_list=parts.saved_operators(),
        base_folder=job.job.dump_folder,
    )
    if not compiles:
        return
    # the blocks count tokens per expert in a buffer: Dynamo must leave that out of the recompute
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for block in model.layers.values():
        if getattr(block, "checkpoint_impl", None) is not None:
            block.checkpoint_impl = None  # torchtitan halves the counts of what counts twice


def bytes_held(model: nn.Module, dims: ParallelDims) -> int:
    """Return the bytes of parameters, gradients and two optimizer states on one rank.

    This is a lower bound of the step's peak: saved activations come on top. It is the same on every
    rank, also where a dimension does not divide: plans depend on it.
    """
    shares = (
        _largest_share(p) * p.element_size() // _data_shards(p, dims) for p in model.parameters()
    )
    return COPIES_OF_PARAMETERS * sum(shares)


def _data_shards(parameter: nn.Parameter, dims: ParallelDims) -> int:
    """Return the number of ranks over which FSDP will shard what a rank has of a parameter."""
    axes = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
    return max(1, expert_shards(dims) if "ep" in (axes or ()) else dims.dp_shard * dims.cp)


def _largest_share(parameter: nn.Parameter) -> int:
    """Return the elements that the rank with the most of them has."""
    sizes = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for num_ranks, placement in zip(
            parameter.device_mesh.shape, parameter.placements, strict=True
        ):
            if isinstance(placement, Shard):
                sizes[placement.dim] = -(-sizes[placement.dim] // num_ranks)
    return math.prod(sizes)


def backend_options(job: JobConfig, held: int) -> dict[str, Any]:
    """Return the `options=` of the backend for a job whose rank holds `held` bytes."""
    table = getattr(job, BACKEND, None)  # absent from a TOML that names no config module
    report = {PREFIX + "report": report_path(job)}
    held_bytes = {PREFIX + "step_peak_bytes": held}
    return {**held_bytes, **compile_options(table), **budget_options(job), **report}


def budget_options(job: JobConfig) -> dict[str, Any]:
    """Return the options that meet torchtitan's memory budget; {} where megamoe's own are written.

    A budget of 0, for which torch keeps nothing, asks for the least that exchanges allow.
    """
    if job.activation_checkpoint.mode != BY_BUDGET or option_of(job, "recompute") == "price":
        return {}
    share = job.activation_checkpoint.memory_budget or LEAST
    return {PREFIX + "recompute": "price", PREFIX + "activation_budget": share}


def _backend(job: JobConfig, held: int) -> tuple[str, dict[str, Any] | None]:
    """Return the backend of a job and its options."""
    torch._dynamo.config.capture_scalar_outputs = True  # as torchtitan's own apply_compile
    if job.compile.backend != BACKEND:
        return job.compile.backend, None
    return BACKEND, {**cacheable_functions({}), **backend_options(job, held)}
