"""Through Inductor the error against float64 is at most 1.1 times that of plain Inductor."""

import pytest
import torch
import torch.distributed as dist

from tests.attention_layers import NormedAttention
from tests.layers import LoopExperts

ALLOWED = 1.1
WIDTH = 32
EXPERTS = (LoopExperts, (WIDTH, 64, 4, 2), (48,))
ATTENTION = (NormedAttention, (WIDTH, 16, 8, 8), (2, 24))
"""A class of layers, the sizes it is made with, and the shape of its input but for the width."""
GATHERED = {"megamoe.dispatch": "all_gather", "megamoe.equal_tokens": True}


def results(layer, function, x, gradient):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = function(x)
    out.backward(gradient)
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


def errors(rank, made, ours):
    """Return what each tensor of plain Inductor and of megamoe is off by, against float64."""
    style, sizes, shape = made
    exact = style(*sizes, dist.group.WORLD, torch.float64)
    own = torch.Generator().manual_seed(rank)
    x, gradient = (torch.randn(*shape, WIDTH, generator=own) for _ in range(2))
    found = []
    for backend, options in (("inductor", None), ("megamoe", {**ours, "megamoe.strict": True})):
        torch._dynamo.reset()
        layer = style(*sizes, dist.group.WORLD, torch.float32)
        with torch.no_grad():
            for p, source in zip(layer.parameters(), exact.parameters(), strict=True):
                source.copy_(p)  # both hold the same float32 values
        compiled = torch.compile(layer, backend=backend, fullgraph=True, options=options)
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            found.append(results(layer, compiled, x, gradient))
    reference = results(exact, exact, x.double(), gradient.double())
    return [tuple(t.double() - r for t in pair) for *pair, r in zip(*found, reference, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        ("mirrored_ranks", {"megamoe.chunks": 2}),
        ("two_ranks", {"megamoe.chunks": 1}),
        ("two_ranks", GATHERED),
    ],
    ids=["two chunks", "one chunk", "gathered"],
)
def test_experts_are_as_exact_as_plain_inductor(request, ranks, options):
    """By the largest error of each tensor."""
    for per_tensor in request.getfixturevalue(ranks).run(errors, EXPERTS, options):
        for plain, ours in per_tensor:
            assert ours.abs().max() <= ALLOWED * plain.abs().max() + 1e-9


@pytest.mark.slow
def test_groups_of_heads_are_as_exact_as_plain_inductor(two_ranks):
    """By the root mean square."""
    for per_tensor in two_ranks.run(errors, ATTENTION, {"megamoe.attention_chunks": 2}):
        for plain, ours in per_tensor:
            assert ours.norm() <= ALLOWED * plain.norm()
