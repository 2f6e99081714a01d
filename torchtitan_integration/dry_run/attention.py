"""Attention as a GPU runs it, for tensors that are on none.

Contract
    One fused operator forward and one backward, whatever device the tensors are on; plain SDPA on
    the meta device would be matrix products that keep every score, and count as such.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    is_causal: bool = True,
) -> torch.Tensor:
    """Return attention of `q` `[B, H, S, D]` over `k` `[B, G, S, D]` and `v` `[B, G, S, E]`.

    Only with `enable_gqa` may G be less than H. Called as torchtitan calls its own attention.
    """
    if isinstance(q, DTensor):  # heads are sharded: each rank does its own
        local = (x.to_local() for x in (q, k, v))
        heads = fused_attention(*local, scale=scale, enable_gqa=enable_gqa, is_causal=is_causal)
        return DTensor.from_local(heads, q.device_mesh, q.placements)
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    attention = torch.ops.aten._scaled_dot_product_efficient_attention
    return attention(q, k, v, None, True, 0.0, is_causal, scale=scale)[0]
