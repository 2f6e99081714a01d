"""Layers whose grouped products are in eight bits eagerly: what compiled products must equal."""

from unittest import mock

import torch
import torch.nn.functional as F

import tests.layers
from moe_compile.ops.quantized_rows import pack_rows, unpack_rows
from moe_compile.ops.scaled_products import (
    GROUPED_MM_FP8,
    MESSAGE_ROWS,
    QUANTIZE_ROWS,
    QUANTIZE_WEIGHT,
    SCALED_GROUPED_MM,
)
from tests.layers import GroupedExperts
from tests.quantized_layers import ALL_TO_ALL, WAIT


def in_eight_bits(style, recipe, gradient):
    """Return `style` whose grouped products quantise their rows and weights."""

    class InEightBits(style):
        def experts(self, rows, received):
            def product(x, weight, offs):
                return GROUPED_MM_FP8(x, weight, offs, recipe, gradient)

            with mock.patch.object(torch, "_grouped_mm", product):
                return super().experts(rows, received)

    return InEightBits


def message_of(rows, got, sent, group):
    """Return the message that an all-to-all of rows in eight bits brings."""
    return WAIT(ALL_TO_ALL(pack_rows(rows, None), got, sent, group.group_name))


class Exchange(torch.autograd.Function):
    """An exchange in eight bits there and back; `came` and `back` get the messages received."""

    @staticmethod
    def forward(ctx, rows, got, sent, group, came, back):
        ctx.way, ctx.messages = (sent, got, group), back
        came.append(message_of(rows, got, sent, group))
        return unpack_rows(came[-1], rows.shape[1], rows.dtype)

    @staticmethod
    def backward(ctx, gradient):
        ctx.messages.append(message_of(gradient, *ctx.way))
        rows = unpack_rows(ctx.messages[-1], gradient.shape[1], gradient.dtype)
        return rows, None, None, None, None, None


class Product(torch.autograd.Function):
    """A product of recipe "blockwise", fed by messages where there are any."""

    @staticmethod
    def forward(ctx, rows, weight, offs, perm, came, back):
        ctx.save_for_backward(rows, weight, offs, perm)
        ctx.messages = back
        return multiplied(rows, weight, offs, perm, came)

    @staticmethod
    def backward(ctx, gradient):
        rows, weight, offs, perm = ctx.saved_tensors
        of_rows = multiplied(gradient, weight.transpose(1, 2), offs, perm, ctx.messages)
        of_weight = torch._grouped_mm(rows.t(), gradient, offs=offs)
        return of_rows, of_weight, None, None, None, None


def multiplied(rows, weight, offs, perm, messages):
    """Return the product of rows, or of those of the message that brought them."""
    quantised = QUANTIZE_ROWS(rows, "blockwise")
    if messages:
        quantised = MESSAGE_ROWS(messages[-1], perm, rows.shape[1])
    by = QUANTIZE_WEIGHT(weight, "blockwise")
    return SCALED_GROUPED_MM(*quantised, *by, offs, "blockwise", rows.dtype)


class FedByMessages(GroupedExperts):
    """Both exchanges in eight bits; rows, and gradients of results, feed products as they came."""

    def forward(self, x):
        self.came, self.back = [], []  # of the dispatch, and of the combine's gradient
        ways = iter([(self.came, []), ([], self.back)])

        def exchange(rows, got, sent, group):
            return Exchange.apply(rows, got, sent, group, *next(ways))

        with mock.patch.object(tests.layers, "all_to_all_single_autograd", exchange):
            return super().forward(x)

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        x = rows[perm]
        gate = F.silu(Product.apply(x, self.w1, offs, perm, self.came, []))
        h = gate * Product.apply(x, self.w3, offs, perm, self.came, [])
        out = Product.apply(h, self.w2, offs, perm, [], self.back)
        return torch.zeros_like(out).index_copy(0, perm, out)
