"""Megatron-Core's MoELayer with its local linear layers, without TransformerEngine.

It asks CUDA for its device and its streams wherever it runs, and makes split sizes numbers of the
host where a tensor is CUDA's alone. `_pretend` answers for the CPU: the device is the CPU, and
split sizes become numbers there too, as on CUDA, but on no stream of their own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.acceptance.subject import Call, Case, Subject

NUM_EXPERTS = 4


def _device() -> torch.device:
    return torch.device("cpu")


def _to_host(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    if not dispatcher.drop_and_pad and point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if torch.is_tensor(splits := getattr(dispatcher, name)):
                setattr(dispatcher, name, splits.numpy())
    return tokens_per_expert


def _pretend() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = None  # 0.16.1 reads the name without TransformerEngine too
    torch.cuda.current_device = _device
    alltoall = token_dispatcher.MoEAlltoAllTokenDispatcher
    alltoall.cuda_dtoh_stream = object()
    alltoall._maybe_dtoh_and_synchronize = _to_host


def _layer(rank: int, **settings: Any) -> Subject:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    _pretend()
    ranks = dist.get_world_size()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=ranks, create_gloo_process_groups=False
        )
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32,
        num_moe_experts=NUM_EXPERTS, moe_ffn_hidden_size=32, moe_router_topk=2,
        expert_model_parallel_size=ranks, add_bias_linear=False, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, moe_router_load_balancing_type="none", **settings,
    )  # fmt: skip
    spec = get_moe_module_spec(use_te=False, num_experts=NUM_EXPERTS, moe_grouped_gemm=False)
    torch.manual_seed(rank)
    model = MoELayer(config, spec.submodules, layer_number=1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return Subject(model=model, calls=[Call(args=(torch.randn(n, 2, 16),)) for n in (8, 12)])


CASES = tuple(
    Case(
        name=f"Megatron MoELayer, {name}",
        package="megatron-core",
        build=functools.partial(_layer, **settings),
        num_ranks=2,
    )
    for name, settings in {
        "alltoall": {"moe_token_dispatcher_type": "alltoall"},
        "alltoall, padded to capacity": {
            "moe_token_dispatcher_type": "alltoall",
            "moe_expert_capacity_factor": 1.0,
            "moe_pad_expert_input_to_capacity": True,
        },
        "allgather": {"moe_token_dispatcher_type": "allgather"},
    }.items()
)
