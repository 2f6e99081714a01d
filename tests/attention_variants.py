"""Attention regions written in ways that are seldom seen, and right to run in groups of heads."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.attention_layers import SplitAttention, swap, to_heads, to_positions


class NamedArguments(SplitAttention):
    """Arguments are given by name, some by NumPy's."""

    def project(self, x):
        q, k, v = super().project(x)
        k, _ = torch.stack(tensors=[k, k], axis=4).unbind(dim=-1)
        return F.rms_norm(q, normalized_shape=(self.d,)), k, v - v.mean(axis=-1, keepdims=True)

    def exchange(self, q, k, v):
        return self.to_heads(q).movedim(source=(1, 2), destination=(1, 2)), *map(
            self.to_heads, (k, v)
        )

    def to_heads(self, x):
        b, _, s, d = x.shape
        n = dist.get_world_size(self.group)
        x = torch.reshape(input=x, shape=(b, n, -1, s, d)).permute(dims=(1, 0, 2, 3, 4))
        x = swap(x.contiguous(), self.group)
        x = x.transpose(dim0=0, dim1=1).swapaxes(axis0=1, axis1=2).reshape(b, -1, n * s, d)
        return torch.cat(tensors=x.chunk(chunks=2, axis=-1), axis=3)


class NamedExchange(SplitAttention):
    """The collectives themselves are called by the names of their arguments."""

    def exchange(self, *operands):
        return tuple(map(self.to_heads, operands))

    def to_heads(self, x):
        b, _, s, d = x.shape
        n = dist.get_world_size(self.group)
        launch = torch.ops._c10d_functional.all_to_all_single(
            input=x.reshape(b, n, -1, s, d).permute(1, 0, 2, 3, 4).contiguous(),
            output_split_sizes=[1] * n,
            input_split_sizes=[1] * n,
            group_name=self.group.group_name,
        )
        x = torch.ops._c10d_functional.wait_tensor(launch)
        return x.permute(1, 2, 0, 3, 4).reshape(b, -1, n * s, d)


class SlopesInFeatures(SplitAttention):
    """Every head of this rank has a number of its own among the features, as for ALiBi."""

    def __init__(self, width, heads, kv_heads, head_width, group, dtype=torch.float32, seed=0):
        super().__init__(width, heads, heads, head_width, group, dtype, seed)
        slopes = torch.arange(1, heads // dist.get_world_size(group) + 1, dtype=dtype) / 7
        self.register_buffer("slopes", slopes.view(1, -1, 1, 1))

    def attend(self, q, k, v):
        slopes = self.slopes.expand(q.shape[0], -1, q.shape[2], self.d)
        q, k, v = (torch.cat([t, slopes], -1) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v)
        return torch.split(o, self.d, -1)[0]


class SlopesBesideResult(SlopesInFeatures):
    """Such numbers travel beside the result."""

    def forward(self, x):
        q, k, v = self.exchange(*self.project(x))
        slopes = self.slopes.expand(q.shape[0], -1, q.shape[2], self.d)
        o = torch.cat([F.scaled_dot_product_attention(q, k, v), slopes], -1)
        return self.output(to_positions(o, self.group)[..., : self.d])


class FixedMask(SplitAttention):
    """All heads share a mask into which no gradient flows."""

    def attend(self, q, k, v):
        far = torch.ones(q.shape[2], k.shape[2], dtype=q.dtype).triu(2) * -4.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=far, enable_gqa=True)


class UnderAutocast(SplitAttention):
    """Heads travel in float32; autocast decides the type of the attention.

    Projections stand outside: autocast would cast an input once eagerly, and twice compiled.
    """

    def forward(self, x):
        operands = self.project(x)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            o = self.attend(*self.exchange(*operands))
            return self.output(to_positions(o, self.group))


VARIANTS = (
    UnderAutocast, NamedArguments, NamedExchange, SlopesInFeatures, SlopesBesideResult, FixedMask,
)  # fmt: skip


class HeadsOfFive(SplitAttention):
    """Rows of a head begin between boundaries of 16 bytes."""

    def __init__(self, width, heads, kv_heads, _, group, dtype=torch.float32, seed=0):
        super().__init__(width, heads, kv_heads, 5, group, dtype, seed)


class MaskOfThree(SplitAttention):
    """The mask has three dimensions, which the fused kernel of a CPU does not take."""

    def attend(self, q, k, v):
        mask = torch.ones(1, q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class Interleaved(SplitAttention):
    """The features of q, k and v alternate in memory."""

    def __init__(self, width, heads, kv_heads, head_width, group, dtype=torch.float32, seed=0):
        super().__init__(width, heads, heads, head_width, group, dtype, seed)

    def exchange(self, q, k, v):
        x = to_heads(torch.stack((q, k, v), -1).flatten(-2), self.group)
        x = x.reshape(*x.shape[:-1], self.d, 3)
        return tuple(piece.squeeze(-1) for piece in x.chunk(3, -1))


class FlashOff(SplitAttention):
    """The program itself forbids the fused kernel."""

    def forward(self, x):
        torch.backends.cuda.enable_flash_sdp(False)
        return super().forward(x)


class UnevenRows(SplitAttention):
    """A number travels behind every row of a head, so that rows begin between boundaries."""

    def exchange(self, *operands):
        longer = (F.pad(t, (0, 1)) for t in operands)
        return tuple(torch.split(to_heads(t, self.group), [self.d, 1], -1)[0] for t in longer)


ROUNDED_BY_GROUP = (
    HeadsOfFive,
    MaskOfThree,
    Interleaved,
    FlashOff,
    UnevenRows,
)
"""Regions as well, whose last bits may differ by group."""
