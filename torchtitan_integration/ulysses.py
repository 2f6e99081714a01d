"""Ulysses: attention on a sequence divided over ranks, each of which attends with its own heads.

Contract
    Around attention, and nowhere else, q, k and v trade their heads for the rest of the sequence,
    and the result trades back. Weights, their names and the model's code are as without it.
    Parts of the sequence lie in the order of ranks: torchtitan's load balancer of context
    parallelism, which deals them otherwise, is off.

B batch, S the whole sequence, n ranks, h the size of all query heads together, m query heads per KV
head, H / n query heads per rank and m' = min(m, H / n), since fewer KV heads than ranks are
repeated before they travel. In each direction of training a rank sends (1 + 1/m') / n units of
2 B S h (n - 1) / n elements, where tensor parallelism sends one unit (MegaScale-MoE, equation 2).

Jacobs et al. 2023, DeepSpeed Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torchtitan.config import JobConfig

from torchtitan_integration.head_exchange import to_heads, to_sequence
from torchtitan_integration.latent_exchange import LatentUlysses, gathers_latent


class Ulysses(ParallelStyle):
    """Divide an attention of q, k and v `[B, heads, S / n, D]` over a mesh."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, _enter, _leave)


def _enter(
    module: nn.Module, qkv: tuple[torch.Tensor, ...], mesh: DeviceMesh
) -> tuple[torch.Tensor, ...]:
    del module
    q, k, v = qkv
    return tuple(to_heads(x, mesh.get_group()) for x in (q, _spread(k, mesh), _spread(v, mesh)))


def _leave(module: nn.Module, heads: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    del module
    return to_sequence(heads, mesh.get_group())


def _spread(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return keys or values with a head for each rank at least, next to those it came from."""
    times = mesh.size() // x.shape[1]
    return x.repeat_interleave(times, 1) if times > 1 else x


def apply_ulysses(blocks: Iterable[nn.Module], mesh: DeviceMesh, job: JobConfig) -> None:
    """Divide the attention of `blocks` over `mesh`, and have `job` deal parts in order."""
    job.parallelism.context_parallel_load_balancer = None
    for block in blocks:
        if gathers_latent(block.attention, mesh.size()):
            parallelize_module(block.attention, mesh, LatentUlysses())
        else:
            parallelize_module(block.attention.inner_attention, mesh, Ulysses())
