"""Memory one GPU of the first pipeline stage needs, by counting.

Contract
    Activations by MegaScale-MoE section 4.1, in units of `tokens * width / ranks` elements per
    layer: all of them, or what selective rematerialization keeps. Allocator, NCCL and workspaces
    are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moe_compile.simulator.method import Overlap
from moe_compile.simulator.step import Setting

BF16: Final = 2
FP32: Final = 4
OPTIMIZER_STATE: Final = 12
"""Bytes per parameter: fp32 weight and two moments, sharded over data-parallel ranks (ZeRO-1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on one GPU."""

    weights: float
    """Parameters in bf16 and their summed gradients in fp32."""
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """Return the sum."""
        return self.weights + self.optimizer + self.activations


def count_memory(setting: Setting) -> Memory:
    """Return what a GPU of the first stage holds at its peak."""
    job, method, model = setting.job, setting.method, setting.model
    whole = 1 if setting.costs.has_heads else method.ranks  # Ulysses: attention on every rank
    dense = setting.dense_params * whole
    embedding = model.vocab_size * model.width / method.ranks
    held = setting.expert_params + dense + embedding
    shared_out = (setting.dense_params + embedding) / max(setting.replicas, 1.0)
    sharded = setting.expert_params / setting.expert_replicas + shared_out
    return Memory(
        weights=held * (BF16 + FP32),
        optimizer=sharded * OPTIMIZER_STATE,
        activations=_layer_bytes(setting) * model.num_layers / job.pipeline * _in_flight(setting),
    )


def _layer_bytes(setting: Setting) -> float:
    model, method = setting.model, setting.method
    expert, ratio = model.expert_width / model.width, model.heads_per_kv
    if method.rebuilds:
        units = 2 * model.top_k * expert + 4 + 2 / ratio
    else:
        units = 2 * method.ranks + model.top_k * (2 + 3 * expert) + 12 + 5 / ratio
    units += 3 * model.num_shared * expert
    return units * setting.costs.local_tokens * model.width * BF16


def _in_flight(setting: Setting) -> float:
    """Return how many micro-batches the first stage holds activations of."""
    job = setting.job
    stages = float(job.pipeline)
    if job.virtual_stages > 1:  # interleaved 1F1B, Megatron-LM (arXiv 2104.04473) section 2.2
        stages *= 1.0 + (job.pipeline - 1) / (job.pipeline * job.virtual_stages)
    return stages + (1.0 if setting.method.overlap is Overlap.TWO_BATCHES else 0.0)
