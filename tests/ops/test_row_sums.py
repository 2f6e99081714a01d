"""Sums per token of rows in any order: against formulas in float64 and finite differences."""

import pytest
import torch

from moe_compile.ops.row_sums import DOTS_OF_PLACES, SUM_OF_PLACES, TOKEN_SUMS

TOKENS, SLOTS, WIDTH = 7, 3, 16


def drawn(dtype, weights, sizes=(TOKENS * SLOTS,), seed=0):
    """Return rows of as many chunks as there are sizes, a permutation, and weights."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(sizes), WIDTH, generator=generator, dtype=torch.float64)
    order = torch.randperm(sum(sizes), generator=generator)
    scores = torch.randn(sum(sizes) // SLOTS, SLOTS, generator=generator, dtype=torch.float64)
    chunks = [one.clone().to(dtype).requires_grad_() for one in rows.split(sizes)]
    return chunks, order, None if weights is None else scores.to(weights).requires_grad_()


def as_the_model_writes_it(chunks, order, scores, dtype):
    rows = torch.cat(chunks)
    ordered = torch.zeros_like(rows)
    ordered[order] = rows
    by_token = ordered.reshape(-1, SLOTS, WIDTH)
    if scores is None:
        return by_token.sum(1).to(dtype)
    product = torch.bmm(scores.reshape(-1, 1, SLOTS), by_token.to(scores.dtype))
    return product.to(dtype).squeeze(1)


def summed(chunks, order, scores, dtype):
    return TOKEN_SUMS(chunks, order, scores, order.shape[0] // SLOTS, SLOTS, dtype)


@pytest.mark.parametrize("weights", [None, torch.float64], ids=["plain", "weighted"])
@pytest.mark.parametrize("sizes", [(21,), (10, 11), (0, 21, 0), (5, 0, 16)], ids=str)
def test_sums_and_gradients_are_those_of_finite_differences(sizes, weights):
    chunks, order, scores = drawn(torch.float64, weights, sizes)
    given = [*chunks] if scores is None else [*chunks, scores]

    def function(*tensors):
        rows, weight = tensors[: len(sizes)], tensors[len(sizes) :]
        return summed([*rows], order, *(weight or [None]), torch.float64)

    expected = as_the_model_writes_it(chunks, order, scores, torch.float64)
    assert torch.allclose(function(*given), expected, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(function, given)


@pytest.mark.parametrize("weights", [None, torch.float32], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_differs_from_float64_is_within_the_bound(dtype, weights):
    """A sum of k terms by k eps of their magnitudes, a gradient of a weight by D; rows' by none."""
    chunks, order, scores = drawn(dtype, weights, (8, 13))
    grad = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = summed(chunks, order, scores, torch.float32 if scores is not None else dtype)
    found.backward(grad.to(found.dtype))
    mine = [one.grad for one in (*chunks, *([] if scores is None else [scores]))]
    exact = [one.detach().double().requires_grad_() for one in chunks]
    weight = None if scores is None else scores.detach().double().requires_grad_()
    as_the_model_writes_it(exact, order, weight, torch.float64).backward(grad.double())
    magnitudes = [one.detach().abs() for one in exact]
    sizes = None if weight is None else weight.detach().abs()
    expected, most = (
        as_the_model_writes_it(rows, order, one, torch.float64).detach()
        for rows, one in ((exact, weight), (magnitudes, sizes))
    )
    eps = torch.finfo(torch.float32).eps
    rounds = torch.finfo(dtype).eps / 2 if weight is None else 0.0
    assert ((found.detach() - expected).abs() <= (SLOTS * eps + rounds) * most).all()
    for got, want in zip(mine, exact, strict=False):
        assert torch.equal(got, want.grad.float().to(dtype)), "one product, rounded once"
    if weight is not None:
        by_slot = torch.zeros(len(order), WIDTH, dtype=torch.float64)
        by_slot[order] = torch.cat(magnitudes)
        bound = WIDTH * eps * (by_slot * grad.double().abs().repeat_interleave(SLOTS, 0)).sum(1)
        assert ((mine[-1] - weight.grad).abs().flatten() <= bound).all()


def test_the_rows_need_not_be_where_a_gradient_is_asked_for():
    chunks, order, scores = drawn(torch.float32, torch.float32)
    summed([chunks[0].detach()], order, scores, torch.float32).sum().backward()
    assert scores.grad is not None and chunks[0].grad is None


def test_as_many_rows_must_come_as_are_to_be_summed():
    chunks, order, scores = drawn(torch.float32, torch.float32)
    with pytest.raises(RuntimeError, match="must be 21; got 20"):
        summed([chunks[0][1:]], order, scores, torch.float32)


def test_sums_and_products_of_places_read_rows_of_all_matrices():
    rows, others = torch.arange(10.0).view(5, 2), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    places = torch.tensor([[4, 0], [1, 3]])
    parts = [rows[:1], rows[1:1], rows[1:]]
    assert SUM_OF_PLACES(parts, places, torch.float32).tolist() == [[8.0, 10.0], [8.0, 10.0]]
    weighted = SUM_OF_PLACES(parts, places, torch.float32, torch.tensor([[1.0, 2], [3, 0]]))
    assert weighted.tolist() == [[8.0, 11.0], [6.0, 9.0]]
    dots = DOTS_OF_PLACES(parts, places, others, torch.float32)
    assert dots.tolist() == [[8.0, 0.0], [3.0, 7.0]]
