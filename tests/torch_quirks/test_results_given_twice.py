"""An `autograd.Function` that writes its result in place has its gradient, by any torch."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_compile.graph.inner_graphs import bodies, is_autograd_function
from moe_compile.torch_quirks.results_given_twice import give_results_once

FX = {"megamoe.codegen": "fx"}


class Filled(torch.autograd.Function):
    """As one that exchanges rows, which are written into new memory."""

    @staticmethod
    def forward(ctx, rows):
        out = torch.empty_like(rows)
        out.copy_(rows)
        out += 1
        return out

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def filled(x):
    return Filled.apply(x * 2).sin()


def recomputed(x):
    return checkpoint(filled, x, use_reentrant=False)


@pytest.mark.parametrize("program", [filled, recomputed])
def test_the_gradient_is_that_of_eager_mode(program):
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="megamoe", options=FX)
    gradients = []
    for run in (compiled, program):
        x = torch.ones(3, requires_grad=True)
        run(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients) and gradients[0].any()


def function_of(program):
    """Return the graph of `program`, and its autograd.Function."""
    captured = []
    torch._dynamo.reset()
    torch.compile(program, backend=lambda gm, _: captured.append(gm) or gm.forward)(
        torch.ones(3, requires_grad=True)
    )
    (gm,) = captured
    (function,) = filter(is_autograd_function, gm.graph.nodes)
    return gm, function


def test_a_result_that_is_returned_twice_is_returned_once():
    """The form of torch 2.11, made here by any torch."""
    gm, function = function_of(filled)
    forward = bodies(function)[0]
    output = forward.graph.find_nodes(op="output")[0]
    (result, *_), saved = output.args[0]
    (written,) = forward.graph.find_nodes(op="call_method", target="copy_")
    output.args = (((result, written), saved),)
    give_results_once(gm)
    assert output.args == (((result, None), saved),)


def test_other_functions_stay_as_they_are():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return rows * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    gm, function = function_of(lambda x: Doubled.apply(x) + 1)
    before = bodies(function)[0].code
    give_results_once(gm)
    assert bodies(function)[0].code == before
