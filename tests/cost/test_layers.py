"""Layers of a graph: each region is within one, equal ones are equal programs, traced once."""

import pytest
import torch
from torch import nn

from moe_compile.backend import rewrite
from moe_compile.config import MegaMoEConfig
from moe_compile.cost import traced_nodes
from moe_compile.cost.traced_nodes import Layers
from moe_compile.plan.decide import forget
from passes.detect_regions import DetectRegions
from passes.fuse_token_sums import FuseTokenSums
from passes.normalize_exchanges import NormalizeExchanges
from passes.pipeline import Level, run_level
from tests.block_layers import ParallelBlock, SerialBlock, block_input
from tests.capture import dynamo_graphs, state
from tests.dispatch_layers import InOrderWeighted, SharedInOrderWeighted
from tests.layers import GroupedExperts
from tests.slow_parameters import slow_but

AUTO = MegaMoEConfig(equal_tokens=True, chunks="auto", attention_chunks="auto")


class Residual(nn.Module):
    """Experts behind a norm, and what the layer was given added to their result."""

    def __init__(self, group):
        super().__init__()
        self.norm, self.experts = (
            nn.RMSNorm(16, dtype=torch.bfloat16),
            GroupedExperts(16, 16, 4, 1, group),
        )

    def forward(self, x):
        return x + self.experts(self.norm(x))


def tokens():
    return torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)


def layers_of(module, x):
    """Return the graph, its findings and its layers, one of each region in graph order."""
    (gm,) = dynamo_graphs(module, x)
    found = state()
    run_level(Level((NormalizeExchanges(), DetectRegions())), gm.graph, found)
    regions = sorted(found.found.regions, key=lambda region: region.result)
    layers = Layers(gm.graph, regions)
    return gm.graph, regions, [layers.around(region) for region in regions]


def assert_whole(regions, layers):
    for region, layer in zip(regions, layers, strict=True):
        assert set(region.body) <= set(layer.program.origins)


@pytest.mark.parametrize("style", [InOrderWeighted, SharedInOrderWeighted])
def test_sums_that_will_be_one_operator_are_priced_as_it(fake_ranks, style):
    """A user may not have asked for it, or have disabled it: then they are as they are written."""
    (gm,) = dynamo_graphs(nn.Sequential(style(16, 24, 8, 2, fake_ranks), nn.ReLU()), tokens())
    taken = {}
    for name, options in {
        "one": {"numerics": "bounded"},
        "exact": {},
        "off": {"numerics": "bounded", "disable_passes": ("fuse_token_sums",)},
    }.items():
        found = state(**options)
        run_level(Level((NormalizeExchanges(), DetectRegions())), gm.graph, found)
        (region,) = found.found.regions
        sums = FuseTokenSums().expected(gm.graph, found)
        phases = Layers(gm.graph, [region], sums=sums).around(region).phases
        taken[name] = [[work.name for work, _ in phase] for phase in phases]
        roles = {node for phase in phases for work, node in phase if work.reads_pieces}
        assert not roles & {*region.body}
    written, forward = {"index_put", "bmm"}, taken["one"][0]
    assert "sum_of_places" in forward and not written & set(forward)
    assert "dots_of_places" in taken["one"][1]
    assert taken["exact"] == taken["off"] and written <= set(taken["exact"][0])


def test_equal_layers_are_equal_programs(fake_ranks):
    """The residual sum is behind the region, and of the layer all the same."""
    module = nn.Sequential(*(Residual(fake_ranks) for _ in range(3)), nn.Linear(16, 4).bfloat16())
    graph, regions, layers = layers_of(module, tokens())
    assert_whole(regions, layers)
    assert len({layer.program.text for layer in layers}) == 1
    sizes = [len(layer.nodes) for layer in layers]
    assert sizes[1] == sizes[2] and sum(sizes) < len(graph.nodes)  # the head is in none
    for layer in layers:
        norms = [n for n in layer.program.origins if "norm" in str(n.target)]
        assert len(norms) == 1
        (given,) = [t for t in layer.program.inputs if not isinstance(t, nn.Parameter)]
        assert given.shape == (32, 16)


@pytest.mark.parametrize("style", slow_but([SerialBlock], [SerialBlock, ParallelBlock]))
def test_attention_and_experts_of_a_block_are_one_layer(fake_ranks, style):
    """Shared experts too, which stand behind the region."""
    module = nn.Sequential(*(style(fake_ranks, fake_ranks) for _ in range(3)))
    _, regions, layers = layers_of(module, block_input())
    assert_whole(regions, layers)
    kinds = [type(region).__name__ for region in regions]
    assert kinds == ["AttentionRegion", "MoERegion"] * 3
    assert [layers[i] is layers[i + 1] for i in range(5)] == [True, False, True, False, True]
    assert len({layer.program.text for layer in layers}) == 1
    one = layers[2].program
    assert [t.shape for t in one.inputs if t.grad_fn is not None] == [block_input().shape]
    weights = dict(style(fake_ranks, fake_ranks).named_parameters())
    assert len([t for t in one.inputs if isinstance(t, nn.Parameter)]) == len(weights)


def test_a_layer_may_be_given_what_several_layers_read(fake_ranks):
    """Regions that stand within one another are in one layer."""

    class Interleaved(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (Residual(fake_ranks) for _ in range(2))

        def forward(self, x):
            return self.two(self.one(x) + x), x.sum()

    _, regions, layers = layers_of(Interleaved(), tokens())
    assert_whole(regions, layers)
    assert layers[0] is not layers[1]


def test_what_a_layer_is_given_is_no_weight(fake_ranks):
    """Its bytes were those of a weight, which chunks share out, where it was traced by itself."""
    _, _, layers = layers_of(
        nn.Sequential(*(GroupedExperts(16, 16, 4, 1, fake_ranks),) * 2), tokens()
    )
    for layer in layers:
        (router,) = [w for w, node in layer.phases[0] if node.name.startswith("matmul")]
        assert router.weight_bytes == 16 * 4 * 2 and router.nbytes == 2 * 32 * (16 + 4)


def test_equal_layers_of_a_graph_are_priced_from_one_trace(fake_ranks, monkeypatch):
    traced = []
    trace = traced_nodes.trace_work
    monkeypatch.setattr(traced_nodes, "trace_work", lambda p: (traced.append(p), trace(p))[1])
    traced_nodes.forget()
    forget()
    module = nn.Sequential(*(Residual(fake_ranks) for _ in range(3)))
    with torch._inductor.config.patch(force_disable_caches=True):
        ours, _ = rewrite(*dynamo_graphs(module, tokens()), AUTO)
    assert len(traced) == 1
    decisions = [one.decision for one in ours.experts]
    assert len(decisions) == 3 and decisions[0] is not None
    assert all(decision is decisions[0] for decision in decisions)
