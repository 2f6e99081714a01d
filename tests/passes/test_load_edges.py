"""Chunks by load: every rank has about as many rows in each, all agree, and reports say so."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_compile.config import MegaMoEConfig
from moe_compile.errors import InvalidConfig
from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import is_launch, is_wait, tensor_of
from moe_compile.hardware import HardwareProfile, load_profile
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState
from passes.detect_regions import DetectRegions
from passes.kinds.by_counts.chunk_edges import NO_SKEW
from passes.kinds.by_counts.kind import region_report
from passes.plan_regions import PlanRegions
from passes.replay.chunk_axis import split_by_load
from passes.rewrite_regions import RewriteRegions
from tests.capture import dynamo_graphs
from tests.equivalence.test_layers import examples
from tests.layers import GatheredCounts, GroupedExperts, LoopExperts
from tests.passes.test_chunk_axis import region_of, run
from tests.proof.verdicts import LOCAL, layer_of
from tests.slow_parameters import slow_but

RANKS = 2


def by_load(rows, num_chunks):
    """Return the chunk of each expert of a rank, found one after another."""
    edges, before, local = [0], 0, len(rows)
    middles = [sum(rows[:e]) + rows[e] / 2 for e in range(local)]
    for chunk in range(1, num_chunks):
        before = sum(middle < chunk * sum(rows) / num_chunks for middle in middles)
        edges.append(min(max(before, edges[-1] + 1), local - num_chunks + chunk))
    return [sum(edge <= e for edge in edges[1:]) for e in range(local)]


@pytest.fixture(scope="module")
def regions(fake_ranks):
    return {style: region_of(style, fake_ranks) for style in (GroupedExperts, GatheredCounts)}


def shares(region, everyone, num_chunks, rank):
    """Return the axis of `rank`, and what it computes, where all ranks send `everyone`."""
    axis = split_by_load(Emitter(region.result), region, num_chunks, rank)
    received = everyone[:, rank * LOCAL : (rank + 1) * LOCAL]
    if tensor_of(region.received_counts).numel() > received.numel():
        received = everyone
    known = {
        node: value.reshape(tensor_of(node).shape)
        for node, value in ((region.counts, everyone[rank]), (region.received_counts, received))
    }
    for node in region.result.graph.nodes:
        if is_wait(node) and is_launch(launch := node.args[0]) and tensor_of(launch) is None:
            known[node] = everyone.reshape(-1).int()
    parts = [{n: run(part[n], known) for n in part} for part in axis.inputs]
    return known, parts, run(axis.chunk_of_run, known), run(axis.num_experts, known)


@pytest.mark.parametrize("style", [GroupedExperts, GatheredCounts])
@given(data=st.data())
@examples(25)
def test_ranks_agree_on_ranges_of_about_as_many_rows(regions, style, data):
    region, num_chunks = regions[style], data.draw(st.integers(2, LOCAL))
    counts = st.integers(0, 9) | st.just(0) | st.integers(0, 200)
    row = st.lists(counts, min_size=RANKS * LOCAL, max_size=RANKS * LOCAL)
    everyone = torch.tensor(data.draw(st.lists(row, min_size=RANKS, max_size=RANKS)))
    totals = everyone.sum(0).view(RANKS, LOCAL).tolist()
    wanted = [by_load(rows, num_chunks) for rows in totals]
    chunk_of = [chunk for of_rank in wanted for chunk in of_rank]
    for rank in range(RANKS):
        known, parts, chunk_of_run, num_experts = shares(region, everyone, num_chunks, rank)
        assert chunk_of_run.tolist() == chunk_of
        assert num_experts.tolist() == [wanted[rank].count(c) for c in range(num_chunks)]
        assert min(num_experts) > 0
        mine = torch.tensor(chunk_of)[rank * LOCAL : (rank + 1) * LOCAL]
        for chunk, part in enumerate(parts):
            received = part[region.received_counts].reshape(RANKS, -1)
            of = mine if received.shape[1] == LOCAL else torch.tensor(chunk_of)
            whole = known[region.received_counts].reshape(RANKS, -1)
            assert torch.equal(received, whole * (of == chunk))
            sent = known[region.counts].reshape(-1) * (torch.tensor(chunk_of) == chunk)
            assert torch.equal(part[region.counts].reshape(-1), sent)


BUSY = HardwareProfile(
    name="of these tests",
    matmul_tflops=0.005,
    memory_gb_per_s=50.0,
    op_overhead_us=0.1,
    link_gb_per_s=0.01,
    link_latency_us=1.0,
)
"""Its experts compute about as long as their rows travel; agreeing on edges takes no time."""


def planned(layer, hardware=BUSY, *, rewrites=True, **options):
    width = layer.router.shape[0]
    x = torch.randn(32, width, dtype=layer.router.dtype, requires_grad=True)
    (gm,) = dynamo_graphs(layer, x)
    ours = CompileState(
        config=MegaMoEConfig(**{"chunk_edges": "load", **options}), hardware=hardware
    )
    DetectRegions().run(gm.graph, ours)
    PlanRegions().run(gm.graph, ours)
    if rewrites:
        RewriteRegions().run(gm.graph, ours)
    (one,) = ours.experts
    said = " ".join(region_report(one, "all_to_all").remarks)
    return one, said, gm.graph


def test_a_region_runs_in_chunks_by_load_with_one_host_read(fake_ranks):
    one, said, graph = planned(layer_of(GroupedExperts, fake_ranks), chunks=2)
    assert one.plan.by_load and one.num_host_reads == 1 and "chunk_edges" not in one.left
    assert "in each step the counts decide which experts a chunk has" in said
    gathers = [n for n in graph.nodes if "all_gather" in str(n.target)]
    assert len(gathers) == 1
    (_, _, gathered) = planned(layer_of(GatheredCounts, fake_ranks), chunks=2)
    as_written = [n for n in gathered.nodes if "all_gather" in str(n.target)]
    assert len(as_written) == 1  # its own


@pytest.mark.parametrize(
    ("style", "dtype", "options", "reason"),
    [
        (LoopExperts, torch.bfloat16, {"chunks": 2}, Reason.EXPERTS_NAMED),
        (LoopExperts, torch.float64, {"chunks": 2}, Reason.NOT_PROVEN),
        (GroupedExperts, torch.bfloat16, {"chunks": LOCAL}, Reason.ALREADY_DONE),
        (GroupedExperts, torch.bfloat16, {"chunks": 1}, Reason.NOT_ASKED),
        (
            GroupedExperts,
            torch.bfloat16,
            {"dispatch": "all_gather", "equal_tokens": True},
            Reason.GATHERED,
        ),
    ],
)
def test_edges_stay_even_with_a_reason(fake_ranks, style, dtype, options, reason):
    one, said, _ = planned(layer_of(style, fake_ranks, dtype), **options)
    assert not one.plan.by_load and one.left["chunk_edges"].reason is reason
    assert f"every chunk has the same number of experts: {reason.value}" in said


AUTO = {"chunk_edges": "auto", "equal_tokens": True}


@pytest.mark.parametrize("chunks", slow_but(["auto"], [2, "auto"]))
def test_auto_goes_by_load_where_a_stated_skew_makes_it_faster(fake_ranks, chunks):
    layer = layer_of(GroupedExperts, fake_ranks)
    one, said, _ = planned(layer, chunks=chunks, routing_skew=0.8, **AUTO)
    assert one.plan.by_load and one.plan.num_chunks == 2 and "chunk_edges" not in one.left
    assert "by routing_skew = 0.8: 2 chunks of experts by load, predicted" in said
    assert "2 chunks of experts, +" in said
    named, _, _ = planned(layer, chunks=2, chunk_edges="load", equal_tokens=True)
    assert named.plan == one.plan


@pytest.mark.parametrize(
    ("options", "reason", "detail"),
    [
        ({}, Reason.BY_PRICE, NO_SKEW),
        ({"routing_skew": 0.1}, Reason.BY_PRICE, ""),
        ({"routing_skew": 0.8, "equal_tokens": False}, Reason.NO_PRICE, ""),
        ({"routing_skew": 0.8, "chunks": 1}, Reason.NOT_ASKED, "the options ask for one chunk"),
        ({"routing_skew": 0.8, "chunk_by": "tokens"}, Reason.BY_PRICE, "chunks are of tokens"),
    ],
    ids=str,
)
def test_auto_leaves_edges_even_with_a_reason(fake_ranks, options, reason, detail):
    layer = layer_of(GroupedExperts, fake_ranks)
    one, said, _ = planned(layer, **{"chunks": 2, **AUTO, **options})
    left = one.left["chunk_edges"]
    assert not one.plan.by_load and (left.reason, left.detail) == (reason, detail)
    assert not left.is_asked
    assert f"every chunk has the same number of experts: {reason.value}" in said


def test_where_agreeing_takes_longer_than_it_gains_edges_stay_even(fake_ranks):
    """On this machine an operator takes 15 us, and there are eight more."""
    layer, hardware = layer_of(GroupedExperts, fake_ranks), load_profile("cpu")
    one, said, _ = planned(layer, hardware, chunks=2, routing_skew=0.8, **AUTO)
    assert not one.plan.by_load and one.left["chunk_edges"].reason is Reason.BY_PRICE
    assert "2 chunks of experts by load, +" in said
    assert one.decision.other_edges.us > one.decision.chosen.us


def test_a_stated_skew_decides_the_number_of_chunks_too(fake_ranks):
    """Four chunks of two ranks' rows where all are alike; where one expert has most, it waits."""
    layer = layer_of(GroupedExperts, fake_ranks)
    even, _, _ = planned(layer, chunks="auto", chunk_edges="even", equal_tokens=True)
    options = {"chunks": "auto", "chunk_edges": "even", "equal_tokens": True}
    hot, said, _ = planned(layer, routing_skew=6.0, **options)
    assert even.decision.routing_skew == 0.0 and hot.decision.routing_skew == 6.0
    assert hot.plan.num_chunks < even.plan.num_chunks
    assert "by routing_skew = 6:" in said and "chunk_edges" not in hot.left


def test_groups_that_are_padded_alike_follow_loads(fake_ranks, monkeypatch):
    titan_layer = pytest.importorskip("tests.proof.titan_layer", reason="needs torchtitan")
    indices = "torchtitan.models.moe.utils.generate_permute_indices"
    monkeypatch.setattr(indices, titan_layer.permute_indices)
    layer = titan_layer.TitanExperts(64, 48, 8, 2, fake_ranks, True).to(torch.bfloat16)
    one, _, _ = planned(layer, chunks=2)
    assert one.plan.by_load and all(map(any, one.proof.padding.values()))


def test_chunks_of_tokens_have_no_edges():
    with pytest.raises(InvalidConfig, match="leave out one of the two"):
        MegaMoEConfig(chunk_edges="load", chunk_by="tokens")
    assert MegaMoEConfig(chunk_edges="auto", chunk_by="tokens").chunk_edges == "auto"
