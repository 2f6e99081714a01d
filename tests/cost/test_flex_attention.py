"""FlexAttention costs two products over the blocks that its mask keeps, five in the backward."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

from moe_compile.cost import flex_mask
from moe_compile.cost.amounts import amounts_of
from moe_compile.cost.kernel_counts import ATTENTION_BACKWARD
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.inner_graphs import is_flex_attention

FLEX = torch.ops.higher_order.flex_attention

BATCH, HEADS, KV_HEADS, BLOCK = 2, 4, 2, 128
SIZE, VALUE_SIZE = 32, 16


def causal(b, h, q, k):
    return q >= k


def everything(b, h, q, k):
    return q.new_ones((), dtype=torch.bool)


def window(size):
    return lambda b, h, q, k: (k <= q) & (q - k < size)


def documents(length):
    starts = torch.arange(length) // 100
    return lambda b, h, q, k: starts[q] == starts[k]


def unchanged(score, b, h, q, k):
    return score


def shares(mask, length):
    """Return, of forward and backward, the operations over those for all pairs, forward."""
    blocks = create_block_mask(mask, 1, None, length, length, device="cpu").as_tuple()
    heads = ((HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, VALUE_SIZE))
    qkv = [torch.randn(BATCH, n, length, size, requires_grad=True) for n, size in heads]

    def program(*qkv):
        output, _, _ = FLEX(*qkv, unchanged, blocks, 1.0, {})
        return torch.autograd.grad(output.sum(), qkv)

    traced = make_fx(program)(*qkv)
    found = [amounts_of(n, NominalSizes({})) for n in traced.graph.nodes if is_flex_attention(n)]
    assert [amounts.num_kernels for amounts in found] == [1, 2]
    whole = 2 * BATCH * HEADS * length**2 * (SIZE + VALUE_SIZE)
    return [amounts.operations / whole for amounts in found]


def kept(blocks):
    """Return what `shares` is where `blocks` is the share of blocks that are computed."""
    return pytest.approx([blocks, ATTENTION_BACKWARD * blocks])


@pytest.mark.parametrize(
    ("mask", "blocks"),
    [
        (everything, 16),
        (causal, 10),
        (and_masks(causal, documents(512)), 10),  # what documents there are is data
        (documents(512), 16),
        (and_masks(causal, window(128)), 4 + 3),
        (and_masks(causal, window(129)), 4 + 3),
        (window(130), 4 + 3 + 2),
        (or_masks(window(1), lambda b, h, q, k: k < 128), 4 + 3),
        (lambda b, h, q, k: (q // 128) == (k // 128), 4),
        (lambda b, h, q, k: (q & 128) == 0, 16),  # bits are not followed
    ],
)  # fmt: skip
def test_operations_are_those_of_the_blocks_that_the_mask_keeps(mask, blocks):
    assert shares(mask, 4 * BLOCK) == kept(blocks / 16)


def test_the_last_block_ends_with_the_sequence():
    assert shares(lambda b, h, q, k: k >= 3 * BLOCK, 3 * BLOCK + 1) == kept(1 / 4)


def test_rows_of_many_blocks_are_sampled(monkeypatch):
    monkeypatch.setattr(flex_mask, "MOST_BLOCKS", 4 * 16)
    assert shares(causal, 16 * BLOCK) == kept((3 + 7 + 11 + 15) / 4 / 16)
