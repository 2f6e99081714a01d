"""Tokens gathered instead of rows exchanged: eager's bits where sums have two addends at most."""

import pytest
import torch
import torch.distributed as dist

from moe_compile.testing.equivalence import differing_tensors
from moe_compile.testing.strategies import RoutingPattern
from tests.dispatch_layers import InOrder, InOrderWeighted
from tests.equivalence.test_layers import CHOSEN, build, inputs, one_case
from tests.equivalence.test_token_chunks import WholeNumbers
from tests.layers import STYLES, GroupedExperts, SharedAndBias
from tests.slow_parameters import exhaustive_but, slow_but


def options(**more):
    return {
        "megamoe.dispatch": "all_gather",
        "megamoe.equal_tokens": True,
        "megamoe.strict": True,
        "megamoe.codegen": "fx",
        **{f"megamoe.{name}": value for name, value in more.items()},
    }


def differing(rank, case, style, settings, *, whole=False):
    torch._dynamo.reset()
    pairs = inputs(case, rank)
    if whole:
        pairs = [tuple((t * 2).round() for t in pair) for pair in pairs]
    return differing_tensors(lambda: build(case, style), pairs, settings)


def differing_sums(rank, case, settings):
    return differing(rank, case, WholeNumbers, settings, whole=True)


def check(results):
    for rank, found in enumerate(results):
        assert not found, f"rank {rank}: {found}"


def two_rows_case(style, *tokens):
    if style is InOrder:
        return one_case(GroupedExperts, *tokens, routing=RoutingPattern.SKEWED)
    return one_case(style, *tokens)


@pytest.mark.parametrize("style", exhaustive_but(CHOSEN, (*STYLES, InOrder), [InOrder]))
def test_two_rows_a_token_change_no_bit_on_two_ranks(two_devices, style):
    check(two_devices.run(differing, two_rows_case(style, (9, 9)), style, options()))


def whole_case(*tokens):
    return one_case(GroupedExperts, *tokens, dtype=torch.float64, top_k=4)


def test_sums_that_do_not_round_are_equal_for_many_rows_a_token(two_ranks):
    """Slices of tokens too: whole numbers add up alike in every order."""
    settings = options(chunk_by="tokens", chunks=3)
    check(two_ranks.run(differing_sums, whole_case((11, 11)), settings))


def with_a_token_of_nan(rank, settings):
    """Return, of eager and compiled, output and gradients where a token of rank 0 is NaN."""
    torch._dynamo.reset()
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(rank)).bfloat16()
    if rank == 0:
        x[2] = torch.nan
    layer, found = GroupedExperts(16, 8, 8, 2, dist.group.WORLD), []
    for run in (layer, torch.compile(layer, backend="megamoe", options=settings)):
        layer.zero_grad()
        rows = x.clone().requires_grad_()
        output = run(rows)
        output[: 2 if rank == 0 else None].float().sum().backward()
        found.append([output.detach(), rows.grad, *(p.grad.clone() for p in layer.parameters())])
    return found


@pytest.mark.parametrize(
    "more",
    slow_but(
        [{}], [{}, {"chunk_by": "tokens", "chunks": 2}, {"dispatch": "all_to_all", "chunks": 2}]
    ),
)
def test_a_token_of_nan_reaches_no_expert_that_did_not_see_it(two_ranks, more):
    """Rows of padding once named tokens and were masked behind a product, which left NaN."""
    for eager, ours in two_ranks.run(with_a_token_of_nan, options(**more)):
        assert any(t.isnan().any() for t in eager)
        assert any(t.isfinite().all(dim=(1, 2)).any() for t in eager if t.dim() == 3)
        for expected, tensor in zip(eager, ours, strict=True):
            assert torch.equal(expected.isnan(), tensor.isnan())


class Positive(GroupedExperts):
    """Its experts' results are positive: a sum's magnitude is the sum of magnitudes."""

    def experts(self, rows, received):
        return super().experts(rows, received).abs()


TOKENS, WIDTH, HIDDEN, EXPERTS = 48, 64, 32, 8
EPS = torch.finfo(torch.bfloat16).eps


def both_ways(rank, style, top_k, settings):
    """Return output and gradients of eager and compiled, as float64."""
    torch._dynamo.reset()
    own = torch.Generator().manual_seed(rank)
    x, gradient = (torch.randn(TOKENS, WIDTH, generator=own).bfloat16() for _ in range(2))
    results = []
    for compiled in (False, True):
        layer = style(WIDTH, HIDDEN, EXPERTS, top_k, dist.group.WORLD)
        run = (
            torch.compile(layer, backend="megamoe", fullgraph=True, options=settings)
            if compiled
            else layer
        )
        rows = x.clone().requires_grad_()
        output = run(rows)
        output.backward(gradient)
        tensors = {"output": output.detach(), "input": rows.grad}
        tensors |= {name: p.grad for name, p in layer.named_parameters()}
        results.append({name: tensor.double() for name, tensor in tensors.items()})
    return results


@pytest.mark.parametrize("top_k", [4, pytest.param(3, marks=pytest.mark.slow)])
def test_more_rows_a_token_are_off_by_the_reported_bound(two_ranks, top_k):
    """Gradients of router and weights are of one row each, and stay as they are."""
    for eager, gathered in two_ranks.run(both_ways, Positive, top_k, options()):
        off = {name: (eager[name] - gathered[name]).abs() for name in eager}
        assert (off["output"] <= (top_k - 1) * EPS * eager["output"].abs()).all()
        assert off["output"].any(), "nothing was added in another order"
        assert off["input"].norm() <= (top_k - 1) * EPS * eager["input"].norm()
        for name in ("router", "w1", "w2", "w3"):
            assert torch.equal(eager[name], gathered[name]), name


class PositiveWeighted(InOrderWeighted):
    def experts(self, rows, received):
        return super().experts(rows, received).abs()


@pytest.mark.slow
def test_a_weighted_sum_of_two_is_off_by_the_reported_bound(two_ranks):
    """The router's gradient is a product summed over the width, by another operator in float32."""
    for eager, gathered in two_ranks.run(both_ways, PositiveWeighted, 2, options()):
        off = {name: (eager[name] - gathered[name]).abs() for name in eager}
        assert (off["output"] <= 2 * EPS * eager["output"].abs()).all()
        assert off["output"].any(), "no share of a rank was rounded"
        assert off["router"].norm() <= EPS * eager["router"].norm()
        for name in ("w1", "w2", "w3"):
            assert torch.equal(eager[name], gathered[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("style", [SharedAndBias])
def test_slices_of_tokens_change_weight_gradients_only(two_ranks, style):
    chunks = 3
    settings = options(chunk_by="tokens", chunks=chunks)
    for eager, gathered in two_ranks.run(both_ways, style, 2, settings):
        for name in eager:
            if name in ("w1", "w2", "w3"):
                off = (eager[name] - gathered[name]).norm()
                assert 0 < off <= chunks * EPS / 2 * eager[name].norm()
            else:
                assert torch.equal(eager[name], gathered[name]), name
