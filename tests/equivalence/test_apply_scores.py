"""Scores before the last product: equal where nothing rounds, within the stated bound elsewhere.

Of torchtitan's layer: tests/integration/test_titan_layer.py.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_compile.report.process_report import REPORT
from moe_compile.testing.equivalence import differing_tensors
from tests.dispatch_layers import (
    Around,
    ByEinsum,
    ByInverse,
    InOrderWeighted,
    IntoEmpty,
    SharedInOrderWeighted,
    WeightedInOrder,
)
from tests.equivalence.test_layers import build
from tests.equivalence.test_sums_on_nodes import whole, whole_pairs
from tests.equivalence.test_two_hops import a_case, check
from tests.layers import GroupedExperts, LoopExperts
from tests.slow_parameters import exhaustive_but, slow_but

OPTIONS = {
    "megamoe.apply_scores": "before_down",
    "megamoe.strict": True,
    "megamoe.codegen": "fx",
}


def asked(options):
    return OPTIONS | {f"megamoe.{name}": value for name, value in options.items()}


def unless_applied():
    said = [line for line in REPORT.compilations[-1].rewrites if line.startswith("apply_scores")]
    is_applied = said and all("applied to the scores of region" in line for line in said)
    return [] if is_applied else [f"it says {said}"]


# --- whole numbers -----------------------------------------------------------------------------

TOKENS = ((9, 14), (16, 3), (4, 0), (1, 1))
"""Steps of unequal ranks: one without a token, and one token each."""
CASES = (
    (InOrderWeighted, {"chunks": 2, "numerics": "bounded"}),
    (Around, {"chunks": 1}),
    (Around, {"chunks": 2, "chunk_by": "tokens"}),
    (InOrderWeighted, {"chunks": 3, "schedule": False}),
    (IntoEmpty, {"chunks": 2}),
    (SharedInOrderWeighted, {"chunks": 2, "numerics": "bounded"}),
    (InOrderWeighted, {"chunks": 1}),
    (WeightedInOrder, {"chunks": 2, "numerics": "bounded"}),
    (ByInverse, {"chunks": 2, "numerics": "bounded"}),
    (ByEinsum, {"chunks": 1, "numerics": "bounded"}),
)


def differing(rank, case, style, options):
    torch._dynamo.reset()
    layer = whole(style)
    pairs = whole_pairs(case, rank)
    return [
        *differing_tensors(lambda: build(case, layer), pairs, asked(options)),
        *unless_applied(),
    ]


@pytest.mark.parametrize(("style", "options"), exhaustive_but(CASES[:5], CASES))
def test_whole_numbers_are_equal(two_ranks, style, options):
    """Output, gradients of tokens, of scores and of experts; other tokens in each step."""
    tokens = TOKENS
    if style in (IntoEmpty, ByEinsum):  # eagerly a rank without rows goes back without a message
        tokens = tokens[:2]
    elif style is SharedInOrderWeighted:
        tokens = ((8, 8),)
    case = a_case(GroupedExperts, *tokens, dtype=torch.float64, hidden=32, top_k=3, num_experts=8)
    check(two_ranks.run(differing, case, style, options))


# --- the bound ---------------------------------------------------------------------------------

WIDTH, HIDDEN, TOP_K, EXPERTS, MOST = 32, 48, 3, 8, 24


class Known(InOrderWeighted):
    """Activations are whole numbers, so that all rounding is of the scores and the last product.

    `learns`: whether scores have a gradient.
    """

    learns = True

    def make_experts(self, width, hidden, rand):
        self.w1 = nn.Parameter(rand(self.local, width, hidden).clamp(-1, 1).round())
        self.w2 = nn.Parameter(rand(self.local, hidden, width))
        factors = rand(MOST, self.top_k).float().sigmoid()
        self.factors = nn.Parameter(factors, requires_grad=self.learns)
        self.register_buffer("wanted", rand(MOST, self.num_experts).float())

    def summed(self, by_token, scores):
        weights = scores.reshape(-1, 1, self.top_k)
        return torch.bmm(weights, by_token.to(scores.dtype)).to(by_token.dtype).squeeze(1)

    def route(self, x):
        return self.factors[: len(x)], torch.topk(self.wanted[: len(x)], self.top_k, -1)[1]


class KnownGroups(Known):
    """Experts by grouped products."""

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        h = torch.relu(torch._grouped_mm(rows[perm], self.w1, offs=offs))
        out = torch._grouped_mm(h, self.w2, offs=offs)
        return torch.zeros_like(out).index_copy(0, perm, out)


class KnownLoop(Known, LoopExperts):
    """Experts one by one, in any type; those of torch's grouped product are of bfloat16."""

    splits, experts = LoopExperts.splits, LoopExperts.experts

    def expert(self, x, e):
        return torch.relu(x @ self.w1[e]) @ self.w2[e]


class Fixed(KnownGroups):
    learns = False


def magnitudes(layer, x, gradient):
    """Return the sums of the magnitudes of the products that make each number, of one step.

    `layer` has the magnitudes of its weights then.
    """
    with torch.no_grad():
        for tensor in (layer.w2, layer.factors):
            tensor.abs_()
    return ran(layer, layer, x, gradient.abs())


def ran(function, layer, x, gradient):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    output = function(x)
    output.backward(gradient)
    named = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "tokens": x.grad, **named}


def made(style, dtype, seed):
    return style(WIDTH, HIDDEN, EXPERTS, TOP_K, dist.group.WORLD, dtype, seed=seed)


def beyond(rank, style, dtype, tokens, options, seeds):
    """Return the numbers beyond the bound, and those whose error is twice that of eager."""
    wrong, squares = [], {}
    for seed in seeds:
        torch._dynamo.reset()
        eager, other = (made(style, dtype, seed) for _ in range(2))
        wide = made(KnownLoop, dtype, seed).double()  # no grouped product has float64
        compiled = torch.compile(other, backend="megamoe", fullgraph=True, options=asked(options))
        own = torch.Generator().manual_seed(100 * seed + rank)
        x = torch.randint(-2, 3, (tokens[rank], WIDTH), generator=own).to(dtype)
        gradient = torch.randn(tokens[rank], WIDTH, generator=own).to(dtype)
        expected, found = (ran(*one, x, gradient) for one in ((eager, eager), (compiled, other)))
        exact = ran(wide, wide, x.double(), gradient.double())
        most = magnitudes(wide, x.double(), gradient.double())
        eps, acc = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
        num = {"output": HIDDEN + TOP_K, "factors": HIDDEN * WIDTH, "w2": sum(tokens) * TOP_K}
        for name, n in num.items():
            if name not in expected:
                continue
            bound = (3 * eps + 2 * n * acc) * most[name]
            if ((found[name].double() - expected[name].double()).abs() > bound).any():
                wrong.append(f"seed {seed}: {name} is beyond the bound")
            if ((found[name].double() - exact[name]).abs() > bound).any():
                wrong.append(f"seed {seed}: {name} is beyond the bound, beside float64")
        for name, tensor in expected.items():
            errors = ((t.double() - exact[name]).square().sum() for t in (found[name], tensor))
            squares[name] = squares.get(name, 0) + torch.stack(list(errors))
        wrong += unless_applied()
        if tokens[rank] > 1 and torch.equal(found["output"], expected["output"]):
            wrong.append(f"seed {seed}: nothing rounds differently, so nothing was rewritten")
    wrong += [f"{name}: {s}" for name, s in squares.items() if s[0] > 4 * s[1]]
    return wrong


BOUNDED = (
    (KnownGroups, torch.bfloat16, (24, 15), {"chunks": 2, "numerics": "bounded"}),
    (KnownLoop, torch.float32, (15, 24), {"chunks": 1}),
    (KnownGroups, torch.bfloat16, (1, 0), {"chunks": 1}),
    (Fixed, torch.bfloat16, (24, 15), {"chunks": 2, "numerics": "bounded"}),
    (KnownLoop, torch.bfloat16, (24, 15), {"chunks": 2, "numerics": "bounded"}),
)


@pytest.mark.parametrize(("style", "dtype", "tokens", "options"), slow_but(BOUNDED[:1], BOUNDED))
def test_outputs_and_gradients_are_within_the_bound(two_ranks, style, dtype, tokens, options):
    """And the errors of all drawn programs are at most twice those of the program as written."""
    two_ranks.regroup()  # programs of one place have one plan
    check(two_ranks.run(beyond, style, dtype, tokens, options, range(2)))
