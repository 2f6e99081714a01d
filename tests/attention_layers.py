"""Attention whose sequence is sharded over a group, in the styles that programs write it.

Of `[b, s, D]` every rank has its own `s` positions; attention sees all `n * s` of them.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_integration import ulysses


def swap(x, group):
    return all_to_all_single_autograd(x, None, None, group)


def to_heads(x, group):
    """[b, H, s, d] of my positions to [b, H / n, n * s, d] of my heads."""
    b, _, s, d = x.shape
    n = dist.get_world_size(group)
    x = swap(x.reshape(b, n, -1, s, d).permute(1, 0, 2, 3, 4).contiguous(), group)
    return x.permute(1, 2, 0, 3, 4).reshape(b, -1, n * s, d)


def to_positions(x, group):
    """[b, H / n, n * s, d] of my heads to [b, H, s, d] of my positions."""
    b, h, s, d = x.shape
    n = dist.get_world_size(group)
    x = swap(x.reshape(b, h, n, s // n, d).permute(2, 0, 1, 3, 4).contiguous(), group)
    return x.permute(1, 0, 2, 3, 4).reshape(b, n * h, s // n, d)


class SplitAttention(nn.Module):
    """One exchange each for q, k and v; the KV heads are shared inside the attention."""

    def __init__(self, width, heads, kv_heads, head_width, group, dtype=torch.float32, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.heads, self.kv_heads, self.d, self.group = heads, kv_heads, head_width, group
        self.wq = nn.Linear(width, heads * head_width, bias=False, dtype=dtype)
        self.wkv = nn.Linear(width, 2 * kv_heads * head_width, bias=False, dtype=dtype)
        self.wo = nn.Linear(heads * head_width, width, bias=False, dtype=dtype)

    def project(self, x):
        b, s, _ = x.shape
        k, v = self.wkv(x).view(b, s, 2, self.kv_heads, self.d).unbind(2)
        q = self.wq(x).view(b, s, self.heads, self.d)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(self, q, k, v):
        shared = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)

    def exchange(self, q, k, v):
        return tuple(to_heads(t, self.group) for t in (q, k, v))

    def output(self, o):
        return self.wo(o.transpose(1, 2).flatten(2))

    def forward(self, x):
        o = self.attend(*self.exchange(*self.project(x)))
        return self.output(to_positions(o, self.group))


class RecipesAttention(SplitAttention):
    """The exchanges of our own recipe for torchtitan."""

    def exchange(self, *operands):
        return tuple(ulysses.to_heads(t, self.group) for t in operands)

    def forward(self, x):
        o = self.attend(*self.exchange(*self.project(x)))
        return self.output(ulysses.to_sequence(o, self.group))


class FusedAttention(SplitAttention):
    """q, k and v in one exchange, concatenated."""

    def exchange(self, *operands):
        n = dist.get_world_size(self.group)
        b, _, s, d = operands[0].shape
        parts = [t.reshape(b, n, -1, s, d).permute(1, 0, 3, 2, 4) for t in operands]
        parts = [t.reshape(n, b, s, -1) for t in parts]
        x = swap(torch.cat(parts, -1), self.group).permute(1, 0, 2, 3).reshape(b, n * s, -1)
        pieces = torch.split(x, [t.shape[-1] for t in parts], -1)
        return tuple(t.reshape(b, n * s, -1, d).transpose(1, 2) for t in pieces)


class RepeatedKVAttention(SplitAttention):
    """KV heads are repeated to as many as query heads before they travel."""

    def project(self, x):
        q, k, v = super().project(x)
        times = self.heads // self.kv_heads
        return q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


class LateRepeatAttention(SplitAttention):
    """KV heads are repeated by an expansion after they travelled."""

    def exchange(self, q, k, v):
        q, k, v = super().exchange(q, k, v)
        return q, self.repeat(k), self.repeat(v)

    def repeat(self, x):
        b, h, s, d = x.shape
        times = self.heads // self.kv_heads
        return x.unsqueeze(2).expand(b, h, times, s, d).reshape(b, h * times, s, d)


class NormedAttention(SplitAttention):
    """Norms of q and k, a rotation, and a chosen backend of the attention."""

    def __init__(self, width, heads, kv_heads, head_width, group, dtype=torch.float32, seed=0):
        super().__init__(width, heads, kv_heads, head_width, group, dtype, seed)
        self.q_norm = nn.RMSNorm(head_width, dtype=dtype)
        self.k_norm = nn.RMSNorm(head_width, dtype=dtype)

    def project(self, x):
        q, k, v = super().project(x)
        return self.rotate(self.q_norm(q)), self.rotate(self.k_norm(k)), v

    def rotate(self, x):
        a, b = x.chunk(2, -1)
        return x * 0.8 + torch.cat((-b, a), -1) * 0.6

    def attend(self, q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return super().attend(q, k, v)


class LatentAttention(SplitAttention):
    """The latent of k and v is gathered, and expanded for this rank's heads only."""

    def __init__(self, width, heads, kv_heads, head_width, group, dtype=torch.float32, seed=0):
        super().__init__(width, heads, kv_heads, head_width, group, dtype, seed)
        self.down = nn.Linear(width, 16 + head_width, bias=False, dtype=dtype)
        self.up = nn.Linear(16, heads * 2 * head_width, bias=False, dtype=dtype)

    def forward(self, x):
        b, s, _ = x.shape
        n, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        q = self.wq(x).view(b, s, self.heads, self.d)
        plain, turned = q.split([self.d // 2, self.d // 2], -1)
        q = torch.cat([plain, turned * 0.5, turned * 0.25], -1).transpose(1, 2)
        latent = all_gather_tensor_autograd(self.down(x), 0, self.group)
        latent = latent.reshape(n, b, s, -1).transpose(0, 1).reshape(b, n * s, -1)
        c, shared = latent.split([16, self.d], -1)
        kv = F.linear(c, self.up.weight.view(n, -1, 16)[rank])
        kv = kv.view(b, n * s, self.heads // n, 2 * self.d)
        k, v = kv.split([self.d, self.d], -1)
        shared = shared[..., : self.d // 2].unsqueeze(2).expand(-1, -1, self.heads // n, -1)
        k = torch.cat([k, shared], -1).transpose(1, 2)
        o = F.scaled_dot_product_attention(to_heads(q, self.group), k, v.transpose(1, 2))
        return self.output(to_positions(o, self.group))


class SharedKeyAttention(SplitAttention):
    """Keys are part of a head's own, part one rotated key for all heads, as in DeepSeek's."""

    def __init__(self, width, heads, kv_heads, head_width, group, dtype=torch.float32, seed=0):
        super().__init__(width, heads, kv_heads, head_width, group, dtype, seed)
        self.down = nn.Linear(width, 12 + head_width, bias=False, dtype=dtype)
        self.norm = nn.RMSNorm(12, dtype=dtype)
        self.up = nn.Linear(12, heads * 2 * head_width, bias=False, dtype=dtype)
        self.wq = nn.Linear(width, heads * 2 * head_width, bias=False, dtype=dtype)
        del self.wkv

    def project(self, x):
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, self.heads, 2 * self.d)
        latent, shared = self.down(x).split([12, self.d], -1)
        kv = self.up(self.norm(latent)).view(b, s, self.heads, 2 * self.d)
        k, v = kv.split([self.d, self.d], -1)
        shared = (shared * 0.5).unsqueeze(2).expand(-1, -1, self.heads, -1)
        k = torch.cat([k, shared], -1)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


STYLES = (
    SplitAttention,
    RecipesAttention,
    FusedAttention,
    RepeatedKVAttention,
    LateRepeatAttention,
    NormedAttention,
    LatentAttention,
    SharedKeyAttention,
)


class BatchExchange(SplitAttention):
    """Decoy: sequences, not heads, travel; the same operators with the same even splits."""

    def forward(self, x):
        q, k, v = (swap(t.contiguous(), self.group) for t in self.project(x))
        return self.output(swap(self.attend(q, k, v).contiguous(), self.group))


class HeadMixing(SplitAttention):
    """Decoy: the heads of a rank are mixed before the exchange back."""

    def attend(self, q, k, v):
        o = super().attend(q, k, v)
        return o + o.flip(1)


class LateNorm(SplitAttention):
    """Decoy: k is normalised over the heads of the rank after it travelled."""

    def attend(self, q, k, v):
        return super().attend(q, k / k.norm(dim=1, keepdim=True), v)


class HeadMask(SplitAttention):
    """Decoy: a bias of its own for every head, as ALiBi's."""

    def attend(self, q, k, v):
        bias = torch.ones(q.shape[1], q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)


class Dropout(SplitAttention):
    """Decoy: dropout draws random numbers, head by head."""

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, enable_gqa=True)


class ReadOutside(SplitAttention):
    """Decoy: what the attention gives is also read before it travels back."""

    def forward(self, x):
        o = self.attend(*self.exchange(*self.project(x)))
        return self.output(to_positions(o, self.group)) + o.mean()


class LocalAttention(SplitAttention):
    """No exchange around the attention, an unrelated one beside it."""

    def forward(self, x):
        y = self.output(self.attend(*self.project(x)))
        return y + swap(x.contiguous(), self.group)


class TensorParallel(SplitAttention):
    """The sequence is gathered before the attention, the result reduced and scattered after."""

    def forward(self, x):
        by_rank = all_gather_tensor_autograd(x, 0, self.group).chunk(
            dist.get_world_size(self.group)
        )
        whole = torch.cat(by_rank, 1)  # gathered along 1 torch 2.12 does not trace it
        y = self.output(self.attend(*self.project(whole)))
        return reduce_scatter_tensor_autograd(y, "sum", 1, self.group)
