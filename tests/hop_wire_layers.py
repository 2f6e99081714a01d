"""Layers that quantise eagerly what two hops send in eight bits: what the compiled form must equal.

Tokens are quantised, not the rows that are made of them, and gradients of sums, not those of rows:
where rows are weighted before they are sent, or after they came back, this is not what the flat
exchange in eight bits sends. Sums on the nodes are left to the test: such a layer has exact ones.
"""

import itertools

import torch

from moe_compile.ops.quantized_rows import pack_rows, unpack_rows
from tests.quantized_layers import Exchange, by_wire


def in_eight_bits(rows):
    return unpack_rows(pack_rows(rows, None), rows.shape[1], rows.dtype)


class Quantised(torch.autograd.Function):
    """Rows, and their gradients, as eight bits bring them."""

    @staticmethod
    def forward(ctx, rows, rows_too, gradient_too):
        ctx.gradient_too = gradient_too
        return in_eight_bits(rows) if rows_too else rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        return in_eight_bits(gradient) if ctx.gradient_too else gradient, None, None


def with_gradient_of(value, other):
    """Return `value`, whose gradient goes to `other` instead."""
    return value.detach() + (other - other.detach())


def flat_eagerly(style, dispatch_wire, combine_wire):
    """Return `style`, of `tests.dispatch_layers`, with flat exchanges by these wires."""

    class Flat(style):
        def forward(self, x):
            self.wires = itertools.cycle([by_wire(dispatch_wire), by_wire(combine_wire)])
            return super().forward(x)

        def exchange(self, rows, out_sizes, in_sizes):
            return Exchange.apply(rows, out_sizes, in_sizes, self.group, *next(self.wires))

    return Flat


def hops_eagerly(style, dispatch_wire, combine_wire, *, rounds=False):
    """Return `style`, of `tests.dispatch_layers`, that quantises as two hops by these wires do.

    Weights of rows get the gradients that the model's own products give; where sums are made on the
    nodes (`rounds`), those of products of what was sent.
    """
    token_too, row_gradient_too = by_wire(dispatch_wire)
    row_too, token_gradient_too = by_wire(combine_wire)

    class InHops(style):
        def forward(self, x):
            flat = [(False, row_gradient_too), (row_too, False)]
            self.ways = itertools.cycle([(False, False)] if rounds else flat)
            return super().forward(x)

        def exchange(self, rows, out_sizes, in_sizes):
            return Exchange.apply(rows, out_sizes, in_sizes, self.group, *next(self.ways))

        def gather(self, x, order, scores):
            sent = super().gather(Quantised.apply(x, token_too, False), order, scores)
            return sent if rounds else with_gradient_of(sent, super().gather(x, order, scores))

        def total(self, x, order, out, scores):
            if rounds:
                return Quantised.apply(
                    super().total(x, order, out, scores), False, token_gradient_too
                )
            of_rows = super().total(x.detach(), order, out, scores.detach())
            of_rows = Quantised.apply(of_rows, False, token_gradient_too)
            return super().total(x, order, out.detach(), scores) + (of_rows - of_rows.detach())

    return InHops
