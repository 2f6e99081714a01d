"""Ulysses: attention on a sequence divided over ranks, each of which attends with its own heads.

Contract
    Around attention, and nowhere else, q, k and v trade their heads for the rest of the sequence,
    and the result trades back. Weights, their names and the model's code are as without it.
    Parts of the sequence lie in the order of ranks: torchtitan's load balancer of context
    parallelism, which orders them differently, is off.
    `to_sequence` undoes `to_heads`. A compiler sees `_c10d_functional` collectives, and counts of
    heads that are read from tensors: the same nodes serve any subset of the heads.

B batch, S the whole sequence, n ranks, h the size of all query heads together, m query heads per KV
head, H / n query heads per rank and m' = min(m, H / n), since fewer KV heads than ranks are
repeated before they travel. In each direction of training a rank sends (1 + 1/m') / n units of
2 B S h (n - 1) / n elements, where tensor parallelism sends one unit (MegaScale-MoE, equation 2).

Jacobs et al. 2023, DeepSpeed Ulysses (arXiv 2309.14509).

Ulysses for multi-head latent attention: gather the latent that keys and values are made of.
Parameters, their names and the result are those of torchtitan's DeepSeek-V3 attention. Queries
and the result are exchanged as in `ulysses`; the latent is gathered over the sequence, and each
rank makes keys and values from it for its own heads only, with no extra computation.

The latent is taken where fewer bytes travel. H heads of keys (with RoPE `K`) and values (`V`), n
ranks, a latent of rank R and one rotated key of size P for all heads: per token a rank sends

    keys and values   H (K + V) (n - 1) / n
    latent            (R + P) (n - 1)

elements, so that the latent is less where (R + P) n < H (K + V): for DeepSeek-V3 up to 71 ranks,
and at 8 it is a ninth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torchtitan.config import JobConfig
from torchtitan.models.deepseek_v3.model.model import Attention, apply_rotary_emb


def to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `[B, H / n, S, D]` of `x` `[B, H, S / n, D]`."""
    by_receiver = x.unflatten(1, (group.size(), -1)).movedim(1, 0)
    by_part = _exchange(by_receiver, group)
    return by_part.movedim(0, 2).flatten(2, 3)


def to_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `[B, H, S / n, D]` of `x` `[B, H / n, S, D]`."""
    by_receiver = x.unflatten(2, (group.size(), -1)).movedim(2, 0)
    by_heads = _exchange(by_receiver, group)
    return by_heads.movedim(0, 1).flatten(1, 2)


def _exchange(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows received; `rows[r]` goes to rank r, and result `[r]` comes from it."""
    return all_to_all_single_autograd(rows.contiguous(), None, None, group)


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
    """Return keys or values with at least a head for each rank: heads repeated in place."""
    times = mesh.size() // x.shape[1]
    return x.repeat_interleave(times, 1) if times > 1 else x


def apply_ulysses(blocks: Iterable[nn.Module], mesh: DeviceMesh, job: JobConfig) -> None:
    """Divide the attention of `blocks` over `mesh`, and have `job` keep parts in order."""
    job.parallelism.context_parallel_load_balancer = None
    for block in blocks:
        if gathers_latent(block.attention, mesh.size()):
            parallelize_module(block.attention, mesh, LatentUlysses())
        else:
            parallelize_module(block.attention.inner_attention, mesh, Ulysses())


ALL_GATHER: Final[Any] = getattr(
    _functional_collectives,
    "all_gather_single_autograd",  # its name in newer torch
    getattr(_functional_collectives, "all_gather_tensor_autograd", None),
)
"""Gathers along dim 0; its gradient is a reduce-scatter."""
Rotation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Rotary embedding of the positions of this rank's part, for `[B, S / n, heads, P]`."""


def gathers_latent(attention: nn.Module, ranks: int) -> bool:
    """Return whether `attention` has a latent that takes fewer bytes to send over `ranks` ranks."""
    if not isinstance(attention, Attention):
        return False
    latent = attention.kv_lora_rank + attention.qk_rope_head_dim
    return latent * ranks < attention.n_heads * (attention.qk_head_dim + attention.v_head_dim)


class LatentUlysses(ParallelStyle):
    """Divide torchtitan's DeepSeek-V3 attention over a mesh, its latent gathered."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.forward = functools.partial(_attend, module, device_mesh)
        return module


def _attend(
    attention: nn.Module,
    mesh: DeviceMesh,
    x: torch.Tensor,
    freqs_cis: torch.Tensor,
    masks: Any,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Return attention of this rank's part of the sequence, `x` `[B, S / n, h]`, over the whole."""
    assert masks is None  # FlexAttention is refused before
    group = mesh.get_group()

    def rotated(y: torch.Tensor) -> torch.Tensor:
        return apply_rotary_emb(y, freqs_cis, positions)

    q = to_heads(_queries(attention, x, rotated).transpose(1, 2), group)
    latent = _gather(_latent(attention, x, rotated), group)
    k, v = _keys_and_values(attention, latent, mesh)
    heads = attention.inner_attention(
        q, k.transpose(1, 2), v.transpose(1, 2), scale=attention.softmax_scale
    )
    own_part = to_sequence(heads, group).transpose(1, 2)
    return attention.wo(own_part.flatten(2))


def _queries(attention: nn.Module, x: torch.Tensor, rotated: Rotation) -> torch.Tensor:
    """Return the queries `[B, S / n, H, K]`."""
    if attention.q_lora_rank == 0:
        q = attention.wq(x)
    else:
        q = attention.wq_b(attention.q_norm(attention.wq_a(x)))
    q = q.unflatten(-1, (-1, attention.qk_head_dim))
    plain, turned = q.split([attention.qk_nope_head_dim, attention.qk_rope_head_dim], -1)
    return torch.cat([plain, rotated(turned)], -1)


def _latent(attention: nn.Module, x: torch.Tensor, rotated: Rotation) -> torch.Tensor:
    """Return the latent `[B, S / n, R + P]`, from which keys and values are made."""
    latent, key = attention.wkv_a(x).split([attention.kv_lora_rank, attention.qk_rope_head_dim], -1)
    return torch.cat([attention.kv_norm(latent), rotated(key.unsqueeze(2)).squeeze(2)], -1)


def _gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `[B, S, C]` of `x` `[B, S / n, C]`."""
    by_part = ALL_GATHER(x.contiguous(), 0, group).unflatten(0, (group.size(), -1))
    return by_part.movedim(0, 1).flatten(1, 2)


def _keys_and_values(
    attention: nn.Module, latent: torch.Tensor, mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[B, S, H / n, K]` and `[B, S, H / n, V]` of the heads of this rank."""
    of_values, key = latent.split([attention.kv_lora_rank, attention.qk_rope_head_dim], -1)
    own_rows = attention.wkv_b.weight.unflatten(0, (mesh.size(), -1))[mesh.get_local_rank()]
    made = F.linear(of_values, own_rows)
    sizes = [attention.qk_nope_head_dim, attention.v_head_dim]
    plain, v = made.unflatten(-1, (-1, sum(sizes))).split(sizes, -1)
    shared = key.unsqueeze(2).expand(-1, -1, plain.shape[2], -1)
    return torch.cat([plain, shared], -1), v
