"""Sums per token that are made on the nodes: within their bound, and bitwise where none rounds."""

import itertools

import pytest
import torch
from torch import nn

from moe_compile.testing.equivalence import differing_tensors
from tests.dispatch_layers import (
    Around,
    InOrder,
    InOrderWeighted,
    OntoTokens,
    SharedInOrder,
)
from tests.equivalence.test_layers import build, inputs
from tests.equivalence.test_token_chunks import WholeNumbers
from tests.equivalence.test_two_hops import (
    EMPTY,
    NODES,
    TOKENS,
    a_case,
    check,
    check_bytes,
    cut_by,
    two_nodes,  # noqa: F401  (a fixture)
)
from tests.layers import GroupedExperts
from tests.node_ranks import in_two_hops, seat
from tests.slow_parameters import exhaustive_but

OPTIONS = {"megamoe.nodes": "rounded", "megamoe.strict": True, "megamoe.codegen": "fx"}


# --- whole numbers -----------------------------------------------------------------------------


class Gated(WholeNumbers):
    """Rows are weighted by whole numbers that are learned; one product in an expert is enough for
    float32 to hold every sum."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.gate = nn.Parameter(torch.arange(self.num_experts).to(self.w1.dtype) % 3 - 1)

    def route(self, x):
        _, chosen = super().route(x)
        return self.gate[chosen].float(), chosen

    def expert(self, x, e):
        return torch.relu(x @ self.w1[e]) @ self.w2[e] + x @ self.w3[e] @ self.w2[e]


def whole(style):
    """Return `style` with the experts, and weights of rows, of `Gated`."""
    return type(f"Whole{style.__name__}", (Gated, style), {})


def whole_case(*tokens, dtype=torch.float64, **changes):
    return a_case(GroupedExperts, *tokens, dtype=dtype, hidden=32, **changes)


def whole_pairs(case, rank):
    return [tuple((t * 2).round() for t in pair) for pair in inputs(case, rank)]


def differing(rank, case, style, axis="experts", num_parts=1):
    torch._dynamo.reset()
    cut = {f"megamoe.{name}": value for name, value in cut_by(axis).items()}
    options = {**OPTIONS, "megamoe.chunks": num_parts, **cut}
    with in_two_hops(num_parts) as left:
        layer = whole(style)
        found = differing_tensors(lambda: build(case, layer), whole_pairs(case, rank), options)
    return [*found, *left]


CASES = (
    (Around, torch.float64),
    (InOrder, torch.float64),
    (InOrderWeighted, torch.float32),
    (OntoTokens, torch.float64),
    (Around, torch.float32),
    (InOrder, torch.float32),
    (OntoTokens, torch.float32),
)


@pytest.mark.parametrize(("style", "dtype"), exhaustive_but(CASES[2:4], CASES, CASES[:1]))
def test_sums_that_do_not_round_are_equal(two_nodes, style, dtype):  # noqa: F811
    """Output, gradients of tokens, of weights of rows and of experts; uneven numbers of tokens."""
    check(two_nodes.run(differing, whole_case(TOKENS, dtype=dtype, top_k=4), style))


IN_PARTS = (
    (Around, "experts", 2),
    (InOrderWeighted, "both", 2),
    (InOrderWeighted, "tokens", 3),
    (SharedInOrder, "experts", 2),
    (InOrder, "tokens", 2),
    (SharedInOrder, "both", 3),
)


@pytest.mark.parametrize(("style", "axis", "num_parts"), exhaustive_but(IN_PARTS[:1], IN_PARTS))
def test_parts_are_added_up_once_all_are_there(two_nodes, style, axis, num_parts):  # noqa: F811
    """Three experts a rank; ranks without tokens."""
    dtype = torch.float32 if style is InOrderWeighted else torch.float64
    case = whole_case(EMPTY, dtype=dtype, num_experts=12, top_k=4)
    check(two_nodes.run(differing, case, style, axis, num_parts))


def bits_in_parts(rank, case, style, num_parts):
    """Return output and gradients of a layer whose sums round, by `num_parts` chunks of experts."""
    torch._dynamo.reset()
    layer = build(case, whole(style))
    options = {**OPTIONS, "megamoe.chunks": num_parts}
    compiled = torch.compile(layer, backend="megamoe", fullgraph=True, options=options)
    ((x, gradient),) = inputs(case, rank)
    x.requires_grad_()
    with in_two_hops(num_parts) as left:
        output = compiled(x)
        output.backward(gradient)
    assert not left, left
    named = layer.named_parameters()
    gradients = {name: p.grad for name, p in named if p.grad is not None}
    return {"output": output.detach(), "input": x.grad, **gradients}


@pytest.mark.slow
def test_chunks_do_not_change_the_order_of_a_sum(two_nodes):  # noqa: F811
    """By expert, then by node: bit for bit as in one chunk, where sums of float32 round."""
    case = whole_case(TOKENS, dtype=torch.float32, num_experts=12, top_k=9)
    results = []
    for num_parts in (1, 3):
        two_nodes.regroup()  # programs of one place would have two plans, and run as written
        two_nodes.run(seat, NODES)
        results.append(two_nodes.run(bits_in_parts, case, InOrder, num_parts))
    for one, other in zip(*results, strict=True):
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


# --- the bound ---------------------------------------------------------------------------------


def recorded(style):
    """Return `style` with tokens that nothing else reads, and what is added up kept aside."""

    class Recorded(style):
        kept = None

        def route(self, x):
            scores, chosen = super().route(x.detach())
            if self.kept is not None:
                self.kept.update(chosen=chosen)
            return scores, chosen

        def gather(self, x, order, scores):
            rows = super().gather(x, order, scores)
            if self.kept is not None:
                rows.register_hook(lambda gradient: self.kept.update(gradient=gradient))
            return rows

        def total(self, x, order, out, scores):
            if self.kept is not None:
                weights = scores.reshape(-1)[order][:, None].detach()
                self.kept.update(out=out.detach(), order=order, weights=weights)
            return super().total(x, order, out, scores)

    return Recorded


def terms(style, kept):
    """Return the terms that a layer of `style` adds up for outputs, and for gradients of tokens."""
    out, gradient, weights = kept["out"], kept["gradient"], kept["weights"]
    if style is InOrder:
        gradient = (gradient.float() * weights).to(gradient.dtype)
    elif style is InOrderWeighted:
        out = out.double() * weights.double()  # a product in float32, rounded with its sum
    else:
        out = out * weights.to(out.dtype)
    return out.double(), gradient.double()


def sums(values, kept, case, base=None):
    """Return float64 sums per token, and sums of magnitudes."""
    tokens = kept["order"] // case.top_k
    zeros = torch.zeros((len(kept["order"]) // case.top_k, case.width), dtype=torch.float64)
    base = zeros if base is None else base.double()
    return base.index_add(0, tokens, values), base.abs().index_add(0, tokens, values.abs())


def in_the_order_stated(values, kept, case, num_nodes, base=None, packed=lambda sums: sums):
    """Return sums per token as the documentation has them: by expert, then by node.

    Rows and the sums of nodes travel `packed`.
    """
    chosen, by_expert = kept["chosen"].sort(1)
    slots = torch.empty_like(values)
    slots[kept["order"]] = packed(values)
    slots = slots.view(-1, case.top_k, case.width)
    total = torch.zeros((len(slots), case.width))
    for node in range(num_nodes):
        on_node = torch.zeros_like(total)
        for slot in range(case.top_k):
            rows = slots[torch.arange(len(slots)), by_expert[:, slot]].float()
            is_there = chosen[:, slot] * num_nodes // case.num_experts == node
            on_node += torch.where(is_there[:, None], rows, 0)
        total += packed(on_node.to(values.dtype)).float()
    return (total if base is None else total + base.float()).to(values.dtype)


def wrong_sums(tensors, kept, case, style, num_nodes, base):
    """Return what is farther from float64 sums than the bound, as shares of it, or not as stated"""
    adds = style is OntoTokens
    values = dict(zip(tensors, terms(style, kept), strict=True))
    u = torch.finfo(case.dtype).eps / 2
    bound = (1 + u) ** 3 - 1 + (case.top_k + adds + 2) * 2**-24
    left = []
    for name in ("output",) if adds else ("output", "input"):
        added_to = base if adds else None
        exact, magnitude = sums(values[name], kept, case, added_to)
        error = (tensors[name].double() - exact).abs()
        if (error > bound * magnitude).any():
            left.append(f"{name}: {(error / (bound * magnitude)).max():.2f} of the bound")
        rounded = values[name].float().to(case.dtype)
        stated = in_the_order_stated(rounded, kept, case, num_nodes, added_to)
        left += [] if torch.equal(tensors[name], stated) else [f"{name}: in another order"]
    return left


def beside_eager(rank, case, eager_style, style, options):
    """Return which gradients of parameters differ, sums of a compiled step, and their terms.

    Terms are those of an eager step of `eager_style`.
    """
    torch._dynamo.reset()
    eager, other = build(case, recorded(eager_style)), build(case, recorded(style))
    compiled = torch.compile(other, backend="megamoe", fullgraph=True, options=options)
    ((x, gradient),) = inputs(case, rank)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    eager.kept = {}
    eager(theirs).backward(gradient)
    with in_two_hops() as left:
        output = compiled(mine)
        output.backward(gradient)
    for name in ("w1", "w2", "w3"):
        if not torch.equal(getattr(eager, name).grad, getattr(other, name).grad):
            left.append(f"gradient of {name}")
    wrong = (eager.router.grad - other.router.grad).float().norm()
    if wrong > 2**-6 * eager.router.grad.float().norm():
        left.append("gradient of the router")
    return left, {"output": output.detach(), "input": mine.grad}, eager.kept


def beyond_bound(rank, case, style, num_nodes):
    """Return which sums and gradients of a compiled step are not as they should be."""
    left, tensors, kept = beside_eager(rank, case, style, style, OPTIONS)
    ((x, _),) = inputs(case, rank)
    return left + wrong_sums(tensors, kept, case, style, num_nodes, 2 * x)


BOUNDED = [*itertools.product((InOrder, Around, InOrderWeighted, OntoTokens), (6, 3))]


@pytest.mark.parametrize(("style", "top_k"), exhaustive_but(BOUNDED[2:6:3], BOUNDED))
def test_sums_stay_within_the_bound(two_nodes, style, top_k):  # noqa: F811
    """Of float64 sums of the very terms; gradients of experts are of the same rows, and equal."""
    check(two_nodes.run(beyond_bound, a_case(GroupedExperts, TOKENS, top_k=top_k), style, NODES))


# --- bytes -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sums_cross_from_a_node_once(two_nodes):  # noqa: F811
    """All four exchanges send a row for each pair of a token and a node, and no more."""
    check_bytes(two_nodes, NODES, a_case(GroupedExperts, (40, 33, 21, 50)), OPTIONS)
