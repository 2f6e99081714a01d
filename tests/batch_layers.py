"""Transformer blocks over whole sequences, with experts on several ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.attention_layers import SplitAttention
from tests.layers import GroupedExperts

WIDTH, HIDDEN, HEADS, POSITIONS = 64, 64, 4, 16


class Block(nn.Module):
    """Norm, causal attention with rotary positions, norm, experts of class `layer`."""

    def __init__(self, layer, dtype=torch.float32, experts=8, top_k=2, seed=0):
        super().__init__()
        torch.manual_seed(seed)  # equal on all ranks
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        angles = torch.arange(POSITIONS)[:, None] / 100.0 ** torch.arange(0, 1, 0.125)
        self.to(dtype)
        self.register_buffer("angles", torch.polar(torch.ones_like(angles), angles))
        self.moe = layer(WIDTH, HIDDEN, experts, top_k, dist.group.WORLD, dtype)

    def rotated(self, x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = pairs * self.angles[: x.shape[1]].view(1, x.shape[1], 1, -1)
        return torch.view_as_real(turned).flatten(3).type_as(x)

    def attend(self, x):
        heads = self.qkv(x).view(*x.shape[:-1], 3, HEADS, -1)
        q, k, v = heads.unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (self.rotated(q), self.rotated(k), v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        x = x + self.attend(self.norms[0](x))
        rows = self.norms[1](x).flatten(0, 1)
        return x + self.moe(rows).view(x.shape)


class Counted(GroupedExperts):
    """A shared expert, and a counter of rows per expert, as torchtitan has them."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.up, self.down = (nn.Parameter(torch.randn(*s) * 0.1) for s in self.shared_sizes())
        self.to(rand(1).dtype)
        self.register_buffer("seen", torch.zeros(self.num_experts))

    def shared_sizes(self):
        return (WIDTH, HIDDEN), (HIDDEN, WIDTH)

    def exchange_counts(self, counts):
        with torch.no_grad():
            self.seen.add_(counts)
        return super().exchange_counts(counts)

    def forward(self, x):
        return super().forward(x) + F.silu(x @ self.up) @ self.down


class Transposed(GroupedExperts):
    """Weights lie the other way round, as torchtitan has them, and experts read views of them."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        for name in ("w1", "w2", "w3"):
            turned = getattr(self, name).detach().transpose(1, 2).contiguous()
            setattr(self, name, nn.Parameter(turned))

    def experts(self, rows, received):
        w1, w2, w3 = (w.transpose(1, 2) for w in (self.w1, self.w2, self.w3))
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        x = rows[perm]
        h = F.silu(torch._grouped_mm(x, w1, offs=offs)) * torch._grouped_mm(x, w3, offs=offs)
        out = torch._grouped_mm(h, w2, offs=offs)
        return torch.zeros_like(out).index_copy(0, perm, out)


class Ulysses(Block):
    """A block whose attention trades positions for heads with the other ranks."""

    def __init__(self, layer, dtype=torch.float32):
        super().__init__(layer, dtype)
        del self.qkv, self.out
        self.attention = SplitAttention(WIDTH, HEADS, 2, 16, dist.group.WORLD, dtype)

    def attend(self, x):
        return self.attention(x)


class Recomputed(Block):
    """A block inside an activation checkpoint."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Stack(nn.Module):
    """Two blocks that share the weights of their norms, and one that is made of another."""

    def __init__(self, layer, dtype=torch.float32):
        super().__init__()
        self.blocks = nn.ModuleList(Block(layer, dtype, seed=seed) for seed in range(2))
        self.blocks[1].norms = self.blocks[0].norms
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=dtype))

    def forward(self, x):
        scale = torch.tanh(self.scale)
        for block in self.blocks:
            x = block(x * scale)
        return x * scale
