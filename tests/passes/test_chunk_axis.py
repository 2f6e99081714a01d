"""How counts are shared out to chunks: every row goes to one chunk, whole experts where asked."""

import pytest
import torch
from torch.fx.node import map_arg

from moe_compile.graph.edit import Emitter
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.query import tensor_of
from moe_compile.regions.detect_moe import find_moe_regions
from passes.replay.chunk_axis import split_by_experts, split_by_tokens
from tests.capture import dynamo_graphs
from tests.layers import GatheredCounts, GroupedExperts
from tests.proof.verdicts import LOCAL, layer_of, tokens
from tests.slow_parameters import slow_but


def region_of(style, group):
    (gm,) = dynamo_graphs(layer_of(style, group), tokens())
    ((region,), _) = find_moe_regions(GraphFacts(gm.graph))
    return region


def shared_out(split, region, num_chunks):
    """Return counts of rows sent and received, whole and as emitted for each chunk."""
    axis = split(Emitter(region.result), region, num_chunks)
    draw = torch.Generator().manual_seed(0)
    both = region.counts, region.received_counts
    whole = {n: torch.randint(7, tensor_of(n).shape, generator=draw) for n in both}
    parts = [{n: run(shares[n], whole) for n in both} for shares in axis.inputs]
    return whole, parts, run(axis.run_counts, whole), run(axis.chunk_of_run, whole)


def run(node, known):
    """Compute `node` from what is known of others."""
    if node in known:
        return known[node]
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: run(n, known))
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


@pytest.mark.parametrize("style", [GroupedExperts, GatheredCounts])
@pytest.mark.parametrize("split", [split_by_experts, split_by_tokens])
@pytest.mark.parametrize("num_chunks", slow_but([3], [2, 3]))
def test_every_row_goes_to_one_chunk(fake_ranks, style, split, num_chunks):
    region = region_of(style, fake_ranks)
    whole, parts, runs, chunk_of = shared_out(split, region, num_chunks)
    for node, counts in whole.items():
        assert torch.equal(sum(part[node] for part in parts), counts)
        assert all((part[node] >= 0).all() for part in parts)
    for chunk, part in enumerate(parts):
        assert runs[chunk_of == chunk].sum() == part[region.counts].sum()


@pytest.mark.parametrize("style", [GroupedExperts, GatheredCounts])
@pytest.mark.parametrize("num_chunks", slow_but([3], [2, 3, 4]))
def test_a_chunk_of_experts_has_all_their_rows(fake_ranks, style, num_chunks):
    whole, parts, _, _ = shared_out(split_by_experts, region_of(style, fake_ranks), num_chunks)
    for node, counts in whole.items():
        experts = torch.arange(counts.numel()).view(counts.shape) % LOCAL
        for chunk, part in enumerate(parts):
            mine = experts * num_chunks // LOCAL == chunk
            assert torch.equal(part[node], counts * mine)
