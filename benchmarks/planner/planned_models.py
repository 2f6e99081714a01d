"""Layers of published models at full size, captured without memory: what the planner is tried on.

Contract
    The graph is Dynamo's own, of a layer over a fake group of so many ranks; parameters and
    inputs have shapes and no data. Attention is on every rank, of its own tokens.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import load_profile
from moe_compile.plan.state import CompileState
from moe_compile.simulator.models import MODELS, TABLE_2, ModelShape
from passes.normalize_exchanges import NormalizeExchanges
from torchtitan_integration.dry_run.world import fused_attention

MOST_RANKS: Final = 64
SHAPES: Final = (*TABLE_2, *(MODELS[name] for name in ("deepseek-v3", "qwen3-235b", "qwen3-30b")))
"""The models of MegaScale-MoE's table 2, and three with many small experts."""


class CapturedError(Exception):
    """Ends a run whose graph is known."""


class Layer(nn.Module):
    """Attention, router, routed and shared experts of a model; `group` exchanges rows."""

    def __init__(self, shape: ModelShape, group: dist.ProcessGroup) -> None:
        """Make parameters without data."""
        super().__init__()
        self.shape, self.group = shape, group
        self.ranks = dist.get_world_size(group)
        self.local = shape.num_experts // self.ranks
        width, expert, local = shape.width, shape.expert_width, self.local
        heads, kv = shape.head_width, int(shape.kv_width)
        self.norms = _weight(2, width)
        self.latent = _latent_size(shape)
        self.down_qkv = _weight(width, self.latent)
        self.qkv = _weight(self.latent or width, heads + 2 * kv)
        self.out = _weight(heads, width)
        self.router = _weight(width, shape.num_experts)
        self.gate, self.up = _weight(local, width, expert), _weight(local, width, expert)
        self.down = _weight(local, expert, width)
        shared = expert * shape.num_shared
        self.shared_up, self.shared_down = _weight(width, 2 * shared), _weight(shared, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output `[S, D]` for one sequence `[S, D]`."""
        h = x + self._attend(F.rms_norm(x, (x.shape[1],), self.norms[0]))
        normed = F.rms_norm(h, (x.shape[1],), self.norms[1])
        if self.shape.num_shared:
            up, gate = (normed @ self.shared_up).chunk(2, -1)
            h = h + (F.silu(gate) * up) @ self.shared_down
        return h + self._route(normed)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        shape, size = self.shape, self.shape.head_size
        x_or_latent = x @ self.down_qkv if self.latent else x
        q, k, v = torch.split(
            x_or_latent @ self.qkv, [shape.head_width, int(shape.kv_width), int(shape.kv_width)], -1
        )
        q, k, v = (t.view(1, x.shape[0], -1, size).transpose(1, 2) for t in (q, k, v))
        shared = shape.heads_per_kv > 1
        out = fused_attention(q, k, v, enable_gqa=shared)
        return out.transpose(1, 2).reshape(x.shape[0], -1) @ self.out

    def _route(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = torch.topk(torch.softmax((x @ self.router).float(), -1), self.shape.top_k)
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = self._counts(flat)
        received = wait_tensor(all_to_all_single(counts, None, None, self.group))
        sent = counts.view(self.ranks, -1).sum(1).tolist()
        got = received.view(self.ranks, -1).sum(1).tolist()
        rows = all_to_all_single_autograd(x[order // self.shape.top_k], got, sent, self.group)
        out = all_to_all_single_autograd(self._experts(rows, received), sent, got, self.group)
        out = out * scores.reshape(-1)[order][:, None].to(out.dtype)
        return torch.zeros_like(x).index_add(0, order // self.shape.top_k, out)

    def _counts(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.histc(flat.float(), bins=self.shape.num_experts).long()

    def _experts(self, rows: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(self.local, device=rows.device).repeat(self.ranks)
        expert_of = torch.repeat_interleave(ids, received, output_size=rows.shape[0])
        order = torch.argsort(expert_of, stable=True)
        ends = torch.cumsum(received.view(self.ranks, -1).sum(0), 0, dtype=torch.int32)
        x = rows[order]
        h = F.silu(torch._grouped_mm(x, self.gate, offs=ends))
        h = h * torch._grouped_mm(x, self.up, offs=ends)
        out = torch._grouped_mm(h, self.down, offs=ends)
        return torch.zeros_like(out).index_copy(0, order, out)


def _latent_size(shape: ModelShape) -> int:
    """Return the width between two products for q, k and v that hold a model's weights; or 0."""
    if not shape.attention_weights:
        return 0
    columns = shape.head_width + 2 * shape.kv_width
    left = shape.attention_weights - shape.head_width * shape.width
    return int(left / (shape.width + columns))


def _weight(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*sizes, dtype=torch.bfloat16, device="meta"))


def fake_group(num_ranks: int) -> dist.ProcessGroup:
    """Return a group of ranks that do not exist; makes this process rank 0 where it is none."""
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=MOST_RANKS, store=FakeStore())
    return dist.new_group(list(range(num_ranks)))


def capture_layer(shape: ModelShape, group: dist.ProcessGroup, tokens: int) -> fx.Graph:
    """Return the Dynamo graph of one layer of `shape` with so many tokens per rank."""
    x = torch.empty(tokens, shape.width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return capture(Layer(shape, group), x)


def capture(layer: nn.Module, x: torch.Tensor) -> fx.Graph:
    """Return the Dynamo graph of `layer`, which is not run."""
    captured: list[fx.GraphModule] = []

    def stop(*_: Any) -> Any:
        raise CapturedError

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        captured.append(gm)
        return stop

    torch._dynamo.reset()
    scalars = torch._dynamo.config.patch(capture_scalar_outputs=True)
    with scalars, contextlib.suppress(CapturedError):
        torch.compile(layer, backend=keep, fullgraph=True)(x)
    graph = captured[0].graph
    state = CompileState(config=MegaMoEConfig(), hardware=load_profile("cpu"))
    NormalizeExchanges().run(graph, state)
    return graph
