"""Through Inductor the error against float64 is at most 1.1 times that of plain Inductor."""

import pytest
import torch
import torch.distributed as dist

from tests.layers import LoopExperts

WIDTH, HIDDEN, EXPERTS, TOP_K, TOKENS = 32, 64, 4, 2, 48
ALLOWED = 1.1


def results(layer, function, x, gradient):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = function(x)
    out.backward(gradient)
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


GATHERED = {
    "megamoe.dispatch": "all_gather",
    "megamoe.equal_tokens": True,
}


def errors(rank, ours, style=LoopExperts):
    """Return, per tensor, the largest error of plain Inductor and of megamoe against float64."""
    exact = style(WIDTH, HIDDEN, EXPERTS, TOP_K, dist.group.WORLD, torch.float64)
    own = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, WIDTH, generator=own)
    gradient = torch.randn(TOKENS, WIDTH, generator=own)
    found = []
    for backend, options in (("inductor", None), ("megamoe", {**ours, "megamoe.strict": True})):
        torch._dynamo.reset()
        layer = style(WIDTH, HIDDEN, EXPERTS, TOP_K, dist.group.WORLD, torch.float32)
        with torch.no_grad():
            for p, source in zip(layer.parameters(), exact.parameters(), strict=True):
                source.copy_(p)  # both hold the same float32 values
        compiled = torch.compile(layer, backend=backend, fullgraph=True, options=options)
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            found.append(results(layer, compiled, x, gradient))
    reference = results(exact, exact, x.double(), gradient.double())
    return [
        tuple((t.double() - r).abs().max().item() for t in pair)
        for *pair, r in zip(*found, reference, strict=True)
    ]


def check(pool, options):
    for per_tensor in pool.run(errors, options):
        for plain, ours in per_tensor:
            assert ours <= ALLOWED * plain + 1e-9


@pytest.mark.slow
def test_two_chunks_are_as_exact_as_inductor(mirrored_ranks):
    check(mirrored_ranks, {"megamoe.chunks": 2})


@pytest.mark.slow
def test_one_chunk_is_as_exact_as_inductor(two_ranks):
    check(two_ranks, {"megamoe.chunks": 1})


@pytest.mark.slow
def test_gathered_tokens_are_as_exact_as_inductor(two_ranks):
    check(two_ranks, GATHERED)
