"""Attention that almost is a region: one program for each reason it is left whole."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from moe_compile.attention.detect_attention import COMPUTES, TENSOR_PARALLEL
from moe_compile.journal.reasons import Reason
from tests import attention_layers as layers
from tests.attention_layers import FusedAttention, SplitAttention, swap, to_heads, to_positions
from tests.attention_variants import SlopesInFeatures


class TwiceExchanged(SplitAttention):
    """The queries go to their heads, back, and again to their heads."""

    def exchange(self, q, k, v):
        return super().exchange(to_positions(to_heads(q, self.group), self.group), k, v)


class TwoGroups(SplitAttention):
    """The values travel over another group of the same ranks."""

    def __init__(self, *sizes_and_group, **settings):
        super().__init__(*sizes_and_group, **settings)
        self.other = dist.new_group()

    def exchange(self, q, k, v):
        return to_heads(q, self.group), to_heads(k, self.group), to_heads(v, self.other)


class UnevenBack(SplitAttention):
    """One rank gets more of the result than the other."""

    def forward(self, x):
        o = self.attend(*self.exchange(*self.project(x)))
        rows = o.permute(2, 0, 1, 3).contiguous()
        n = rows.shape[0]
        back = all_to_all_single_autograd(rows, [n // 2, n // 2], [n - 4, 4], self.group)
        return back.sum()


class Interleaved(SplitAttention):
    """The parts of the sequence are dealt out position by position."""

    def exchange(self, *operands):
        return tuple(self.interleave(t) for t in operands)

    def interleave(self, x):
        b, _, s, d = x.shape
        n = dist.get_world_size(self.group)
        x = swap(x.reshape(b, n, -1, s, d).permute(1, 0, 2, 3, 4).contiguous(), self.group)
        return x.permute(1, 2, 3, 0, 4).reshape(b, -1, s * n, d)


class BackByBatch(SplitAttention):
    """The result is exchanged by batch, not by the sequence that was gathered."""

    def forward(self, x):
        o = self.attend(*self.exchange(*self.project(x)))
        return self.output(swap(o.contiguous(), self.group)[:, :, : x.shape[1]].repeat(1, 2, 1, 1))


class Flattened(SplitAttention):
    """Batch and heads are one dimension."""

    def attend(self, q, k, v):
        b, h, _, _ = q.shape
        k, v = (t.repeat_interleave(h // t.shape[1], 1) for t in (k, v))
        o = F.scaled_dot_product_attention(*(t.flatten(0, 1) for t in (q, k, v)))
        return o.unflatten(0, (b, h))


class ReadInside(SplitAttention):
    """The exchanged queries are read outside as well."""

    def forward(self, x):
        q, k, v = self.exchange(*self.project(x))
        return self.output(to_positions(self.attend(q, k, v), self.group)) + q.mean()


class WrittenMask(SplitAttention):
    """The mask is written after the attention, before the result is back."""

    def __init__(self, *sizes_and_group, **settings):
        super().__init__(*sizes_and_group, **settings)
        self.register_buffer("mask", torch.zeros(12, 12))

    def attend(self, q, k, v):
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=True)
        self.mask.add_(1.0)
        return o


class ReadMeanwhile(SplitAttention):
    """Two losses read the queries after they were sent, before the attention."""

    def exchange(self, q, k, v):
        b, _, s, d = q.shape
        n = dist.get_world_size(self.group)
        sent = q.reshape(b, n, -1, s, d).permute(1, 0, 2, 3, 4).contiguous()
        queries = swap(sent, self.group).permute(1, 2, 0, 3, 4).reshape(b, -1, n * s, d)
        self.losses = sent.square().mean() + sent.abs().mean()
        return queries, to_heads(k, self.group), to_heads(v, self.group)

    def forward(self, x):
        return super().forward(x) + self.losses


class Autocast(SplitAttention):
    """The attention alone runs under autocast."""

    def attend(self, q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().attend(q, k, v)


class LearnedMask(SplitAttention):
    """All heads share a mask that is learned, as a bias by position."""

    def __init__(self, *sizes_and_group, **settings):
        super().__init__(*sizes_and_group, **settings)
        self.bias = nn.Parameter(torch.zeros(12, 12))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias, enable_gqa=True)


class LearnedSlopes(SlopesInFeatures):
    """Numbers of every head, joined to its features, are learned."""

    def __init__(self, *sizes_and_group, **settings):
        super().__init__(*sizes_and_group, **settings)
        slopes = self.slopes
        del self.slopes
        self.slopes = nn.Parameter(slopes)


class LocalKeys(SplitAttention):
    """Keys and values of one size are computed where they are needed, and scaled for all heads."""

    def __init__(self, *sizes_and_group, **settings):
        super().__init__(*sizes_and_group, **settings)
        self.gain = nn.Parameter(torch.ones(self.d))

    def exchange(self, q, k, v):
        k, v = (torch.cat([t, t], 2)[:, ::2] * self.gain for t in (k, v))
        return to_heads(q, self.group), k, v


class SharedPart(FusedAttention):
    """What is sent has a part that all heads share."""

    def exchange(self, *operands):
        n = dist.get_world_size(self.group)
        b, _, s, d = operands[0].shape
        parts = [t.reshape(b, n, -1, s, d).permute(1, 0, 3, 2, 4) for t in operands]
        shared = operands[0].mean(1).expand(n, b, s, d)
        parts = [*(t.reshape(n, b, s, -1) for t in parts), shared]
        x = swap(torch.cat(parts, -1), self.group).permute(1, 0, 2, 3).reshape(b, n * s, -1)
        *pieces, shared = torch.split(x, [t.shape[-1] for t in parts], -1)
        q, k, v = (t.reshape(b, n * s, -1, d).transpose(1, 2) for t in pieces)
        return q, torch.cat([k, shared.unsqueeze(1).expand(b, k.shape[1], n * s, d)], -1), v

    def attend(self, q, k, v):
        return super().attend(torch.cat([q, q], -1), k, v)


class SentTwice(SplitAttention):
    """One tensor is sent twice, as queries and as keys, and read once more after the attention."""

    def forward(self, x):
        b, s, _ = x.shape
        n = dist.get_world_size(self.group)
        q, _, _ = self.project(x)
        sent = q.reshape(b, n, -1, s, self.d).permute(1, 0, 2, 3, 4).contiguous()
        q, k = (swap(sent, self.group).permute(1, 2, 0, 3, 4).flatten(2, 3) for _ in range(2))
        return self.output(to_positions(self.attend(q, k, k), self.group)) + sent.sin().mean()


class RepeatedPart(SplitAttention):
    """One key for all heads, in what is sent for others as well, is repeated for each of them."""

    def exchange(self, *operands):
        n = dist.get_world_size(self.group)
        b, _, s, d = operands[0].shape
        q, k, _ = (t.detach() for t in operands)
        parts = [q.reshape(b, n, -1, s, d), k[:, :n].reshape(b, n, -1, s, d)]
        parts = [t.permute(1, 0, 3, 2, 4).reshape(n, b, s, -1) for t in parts]
        x = swap(torch.cat(parts, -1), self.group).permute(1, 0, 2, 3).reshape(b, n * s, -1)
        pieces = torch.split(x, [t.shape[-1] for t in parts], -1)
        q, k = (t.reshape(b, n * s, -1, d).transpose(1, 2) for t in pieces)
        k = k.repeat_interleave(self.heads // n, 1)
        return q, k, k


class AsIntegers(SplitAttention):
    """The queries are taken for integers and back: no gradient flows through that."""

    def attend(self, q, k, v):
        return super().attend(q.contiguous().view(torch.int32).view(torch.float32), k, v)


class Padded(SplitAttention):
    """Zeros that are made after the attention travel beside the result."""

    def forward(self, x):
        o = self.attend(*self.exchange(*self.project(x)))
        o = torch.cat([o, torch.zeros(o.shape)], -1)
        return self.output(to_positions(o, self.group)[..., : self.d])


NO_REGION = Reason.NOT_BETWEEN_EXCHANGES
NOTHING_BACK = (
    "its result must be sent by an even all-to-all, alone, with only data movement in between"
)

# style -> its reason, and what its detail begins with
REFUSED = {
    layers.BatchExchange: (
        NO_REGION,
        "the exchange before it must send heads to other ranks, and does not",
    ),
    layers.HeadMixing: (NO_REGION, NOTHING_BACK),
    layers.LateNorm: (NO_REGION, COMPUTES),
    layers.HeadMask: (Reason.VARIES_BY_HEAD, ""),
    layers.Dropout: (Reason.RANDOM, ""),
    layers.ReadOutside: (NO_REGION, NOTHING_BACK),
    layers.LocalAttention: (NO_REGION, "it stands between no exchanges"),
    layers.TensorParallel: (NO_REGION, TENSOR_PARALLEL),
    TwiceExchanged: (
        NO_REGION,
        "q, k and v must be exchanged once each, and one is exchanged more than once",
    ),
    TwoGroups: (
        NO_REGION,
        "all its exchanges must be over one process group, and they are over several",
    ),
    UnevenBack: (
        NO_REGION,
        "the exchanges around it must send equally much to every rank, and one does not",
    ),
    Interleaved: (NO_REGION, "the exchange before it must gather the whole sequence, and does not"),
    BackByBatch: (
        NO_REGION,
        "the exchange after it must split the sequence that was gathered before it, and does not",
    ),
    Flattened: (Reason.HEADS_LOST, ""),
    ReadInside: (Reason.ESCAPES, ""),
    WrittenMask: (Reason.MUTATED_MEANWHILE, ""),
    Autocast: (Reason.STATE_CHANGES, ""),
    ReadMeanwhile: (Reason.GRADIENT_ORDER, ""),
    SentTwice: (Reason.GRADIENT_ORDER, ""),
    LearnedMask: (Reason.GRADIENT_BESIDE, ""),
    LearnedSlopes: (Reason.GRADIENT_BESIDE, ""),
    SharedPart: (Reason.GRADIENT_BESIDE, ""),
    AsIntegers: (NO_REGION, COMPUTES),
    RepeatedPart: (Reason.HEADS_LOST, ""),
    Padded: (Reason.HEADS_LOST, ""),
}
