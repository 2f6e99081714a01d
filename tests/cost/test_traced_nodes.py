"""A graph is traced once; the work around each of its regions is a stretch of that."""

import pytest
import torch
from torch import nn

from moe_compile.backend import rewrite
from moe_compile.config import MegaMoEConfig
from moe_compile.cost import stored_work
from moe_compile.cost.traced_nodes import TracedNodes
from tests.capture import dynamo_graphs
from tests.layers import GroupedExperts

ROWS = torch.ones(8, 4, requires_grad=True)
WEIGHTS = tuple(torch.ones(4, 4, requires_grad=True) for _ in range(3))


def chain(x, a, b, c):
    return (((x @ a).cumsum(1) @ b).cumsum(1) @ c).cumsum(1)


@pytest.fixture
def layers():
    """Return the graph of three products with sums behind, and its calls."""
    (gm,) = dynamo_graphs(chain, ROWS, *WEIGHTS)
    return gm.graph, [n for n in gm.graph.nodes if n.op.startswith("call")]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_stretch_takes_what_it_takes_where_it_is_traced_without_the_others(layers, place):
    """Where it is traced alone, what it is given looks like a weight."""
    graph, calls = layers
    nodes = set(calls[2 * place : 2 * place + 2])
    found = TracedNodes(graph).among(nodes)
    alone = TracedNodes(graph, nodes).phases
    for phase, expected in zip(found, alone, strict=True):
        assert {node for _, node in phase} <= nodes

        def amounts(works):
            return sorted((w.operations, w.nbytes + w.weight_bytes) for w, _ in works)

        assert amounts(phase) == amounts(expected)
    for phase in found:
        assert all(need < number for number, (work, _) in enumerate(phase) for need in work.needs)
        assert sum(bool(work.needs) for work, _ in phase) == len(phase) - 1


def test_what_is_needed_through_other_work_is_still_needed(layers):
    """The last product waits for the first, though what is between is not counted."""
    graph, calls = layers
    forward, backward = TracedNodes(graph).among({calls[0], calls[-2]})
    assert [(work.needs, node) for work, node in forward] == [((), calls[0]), ((0,), calls[-2])]
    first = [number for number, (_, node) in enumerate(backward) if node is calls[0]]
    last = [number for number, (_, node) in enumerate(backward) if node is calls[-2]]
    assert first and last
    assert all(set(backward[number][0].needs) & set(last) for number in first)


def test_all_regions_of_a_graph_are_priced_from_one_trace(fake_ranks, monkeypatch):
    traced = []
    trace = stored_work.trace_work
    monkeypatch.setattr(stored_work, "trace_work", lambda p: (traced.append(p), trace(p))[1])
    stored_work.forget()
    module = nn.Sequential(*(GroupedExperts(16, 16, 4, 1, fake_ranks) for _ in range(3)))
    tokens = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    config = MegaMoEConfig(equal_tokens=True, chunks="auto")
    with torch._inductor.config.patch(force_disable_caches=True):
        ours, _ = rewrite(*dynamo_graphs(module, tokens), config)
    assert len(traced) == 1
    assert len(ours.experts) == 3 and all(one.decision is not None for one in ours.experts)
