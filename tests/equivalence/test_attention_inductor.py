"""Through Inductor, groups of heads are as exact as plain Inductor."""

import pytest
import torch
import torch.distributed as dist

from tests.attention_layers import NormedAttention

SIZES = (32, 16, 8, 8)
"""Width, heads, KV heads, head width."""
OPTIONS = {"megamoe.attention_chunks": 2}
ALLOWED = 1.1
"""What the root mean square error may be of plain Inductor's."""


def results(layer, function, x, gradient):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(gradient)
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


def errors(rank):
    """Return per tensor the error of plain Inductor and of ours."""
    exact = NormedAttention(*SIZES, dist.group.WORLD, torch.float64)
    own = torch.Generator().manual_seed(rank)
    x, gradient = (torch.randn(2, 24, SIZES[0], generator=own) for _ in range(2))
    found = []
    for backend, settings in (("inductor", None), ("megamoe", OPTIONS)):
        torch._dynamo.reset()
        layer = NormedAttention(*SIZES, dist.group.WORLD)
        with torch.no_grad():
            for p, q in zip(layer.parameters(), exact.parameters(), strict=True):
                q.copy_(p)
        compiled = torch.compile(layer, backend=backend, fullgraph=True, options=settings)
        found.append(results(layer, compiled, x, gradient))
    reference = results(exact, exact, x.double(), gradient.double())
    return [
        tuple((t.double() - r).square().mean().sqrt().item() for t in pair)
        for *pair, r in zip(*found, reference, strict=True)
    ]


@pytest.mark.slow
def test_groups_of_heads_are_as_exact_as_plain_inductor(two_ranks):
    for per_tensor in two_ranks.run(errors):
        for plain, ours in per_tensor:
            assert ours <= ALLOWED * plain
