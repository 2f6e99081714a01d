"""Layers around `torch.distributed`'s own collectives, in chunks, equal eager bit for bit."""

import pytest
import torch
import torch.distributed as dist

from moe_compile.report.process_report import REPORT
from tests import legacy_layers as layers

TOKENS = (9, 14)


def make(style, hidden=32):
    return style(16, hidden, 8, 2, dist.group.WORLD, torch.bfloat16)


def inputs(rank):
    own = torch.Generator().manual_seed(rank)
    return [tuple(torch.randn(TOKENS[rank], 16, generator=own).bfloat16() for _ in range(2))]


def run_without_gradients(rank):
    torch._dynamo.reset()
    (x, _), known = inputs(rank)[0], len(REPORT.compilations)
    options = {"megamoe.chunks": 2, "megamoe.strict": True, "megamoe.codegen": "fx"}
    layer = make(layers.WithoutGradients)
    compiled = torch.compile(layer, backend="megamoe", fullgraph=True, options=options)
    with torch.no_grad():
        equal = torch.equal(compiled(x), layer(x))
    return equal, [r.verdict for c in REPORT.compilations[known:] for r in c.regions]


@pytest.mark.slow
def test_rows_into_empty_memory_equal_eager_without_gradients(two_ranks):
    """The memory was read inside the region, and outside of it once it was filled."""
    for equal, verdicts in two_ranks.run(run_without_gradients):
        assert equal
        assert verdicts == ["chunked"]


def run_in_pieces(rank):
    """Return what differs where the graph ends at the counts, and what became of the layer."""
    torch._dynamo.reset()
    known = len(REPORT.compilations)
    options = {"megamoe.chunks": 2, "megamoe.codegen": "fx"}
    eager, other = make(layers.Bincount), make(layers.Bincount)
    compiled = torch.compile(other, backend="megamoe", options=options)
    (x, gradient), found = inputs(rank)[0], []
    for function in (eager, compiled):
        x = x.detach().requires_grad_()
        out = function(x)
        out.backward(gradient)
        found.append((out, x.grad))
    weights = zip(eager.parameters(), other.parameters(), strict=True)
    pairs = [*zip(*found, strict=True), *((a.grad, b.grad) for a, b in weights)]
    differing = [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    return differing, [r.verdict for c in REPORT.compilations[known:] for r in c.regions]


def test_counts_by_bincount_end_a_graph_and_the_layer_is_in_the_next(two_ranks):
    for differing, verdicts in two_ranks.run(run_in_pieces):
        assert differing == []
        assert verdicts == ["chunked"]
