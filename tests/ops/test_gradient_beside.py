"""Rows are handed on as they are; their gradient goes to two places."""

import torch

from moe_compile.ops.gradient_beside import GRADIENT_BESIDE


def test_the_gradient_goes_to_both():
    rows, beside = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    gradient = torch.randn(4, 3)
    result = GRADIENT_BESIDE(rows, beside)
    result.backward(gradient)
    assert torch.equal(result, rows)
    assert torch.equal(rows.grad, gradient) and torch.equal(beside.grad, gradient)


def test_a_weight_of_a_product_in_parts_has_the_gradient_of_the_whole():
    x, w = torch.randn(6, 4), torch.randn(4, 5, requires_grad=True)
    whole = x @ w
    parts = [
        GRADIENT_BESIDE(part @ w.detach(), beside)
        for part, beside in zip(x.split(2), whole.split(2), strict=True)
    ]
    gradient = torch.randn(6, 5)
    (by_parts,) = torch.autograd.grad(parts, w, gradient.split(2))
    (at_once,) = torch.autograd.grad(x @ w, w, gradient)
    assert torch.equal(by_parts, at_once)
    assert torch.equal(torch.cat(parts), torch.cat([p @ w for p in x.split(2)]))
