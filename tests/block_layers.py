"""A transformer block: attention over a sharded sequence, a router, routed and shared experts.

Every matrix product of a block can be told by its sizes.
"""

import torch
from torch import nn

from tests.attention_layers import SplitAttention
from tests.layers import SharedAndBias

WIDTH, HIDDEN, EXPERTS, TOP_K = 64, 48, 8, 2
HEADS, KV_HEADS, HEAD_WIDTH = 12, 4, 16
BATCH, POSITIONS = 3, 40
TOKENS = BATCH * POSITIONS


class SerialBlock(nn.Module):
    """The experts see what the attention gave; each kind has a group of its own."""

    def __init__(self, attention_group, expert_group):
        super().__init__()
        bf16 = torch.bfloat16
        heads = (HEADS, KV_HEADS, HEAD_WIDTH)
        self.attention = SplitAttention(WIDTH, *heads, attention_group, bf16)
        self.experts = SharedAndBias(WIDTH, HIDDEN, EXPERTS, TOP_K, expert_group)

    def forward(self, x):
        h = x + self.attention(x)
        return h + self.experts(h.flatten(0, 1)).view_as(h)


class ParallelBlock(SerialBlock):
    """Attention and experts both see the input."""

    def forward(self, x):
        return x + self.attention(x) + self.experts(x.flatten(0, 1)).view_as(x)


def block_input():
    return torch.randn(BATCH, POSITIONS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
