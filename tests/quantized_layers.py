"""Layers whose exchanges or products quantise eagerly: what compiled ones must equal."""

import itertools
from unittest import mock

import torch

import tests.layers
from moe_compile.ops.quantized_rows import pack_rows, unpack_rows
from moe_compile.ops.scaled_products import GROUPED_MM_FP8

ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single
WAIT = torch.ops._c10d_functional.wait_tensor
GROUPED_MM = torch._grouped_mm


def exchanged(rows, output_splits, input_splits, group, quantized):
    if not quantized:
        return WAIT(ALL_TO_ALL(rows.contiguous(), output_splits, input_splits, group.group_name))
    message = pack_rows(rows, None)
    message = WAIT(ALL_TO_ALL(message, output_splits, input_splits, group.group_name))
    return unpack_rows(message, rows.shape[1], rows.dtype)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, output_splits, input_splits, group, rows_too, gradient_too):
        ctx.back = (input_splits, output_splits, group, gradient_too)
        return exchanged(rows, output_splits, input_splits, group, rows_too)

    @staticmethod
    def backward(ctx, gradient):
        return exchanged(gradient, *ctx.back), None, None, None, None, None


def by_wire(wire):
    """Return whether rows, and whether their gradients, travel in eight bits."""
    return wire != "same", wire == "fp8"


def quantized_eagerly(style, dispatch_wire, combine_wire):
    """Return `style` whose dispatch and combine, called in turn, use these wires."""

    class Quantized(style):
        def forward(self, x):
            wires = itertools.cycle([dispatch_wire, combine_wire])

            def exchange(rows, output_splits, input_splits, group):
                way = by_wire(next(wires))
                return Exchange.apply(rows, output_splits, input_splits, group, *way)

            with mock.patch.object(tests.layers, "all_to_all_single_autograd", exchange):
                return super().forward(x)

    return Quantized


def in_eight_bits(style, recipe, *elements):
    """Return `style` whose grouped products quantise what they multiply.

    `elements` are the element types of each product that is called, in turn.
    """

    class InEightBits(style):
        def experts(self, rows, received):
            turn = itertools.cycle(elements)

            def product(x, weight, offs):
                with mock.patch.object(torch, "_grouped_mm", GROUPED_MM):  # which it may call
                    return GROUPED_MM_FP8(x, weight, offs, recipe, *next(turn))

            with mock.patch.object(torch, "_grouped_mm", product):
                return super().experts(rows, received)

    return InEightBits
