"""What becomes of the graph of experts with a capacity: weights cut once, launches first."""

import dataclasses

import pytest
import torch

from moe_compile.backend import rewrite
from moe_compile.graph.query import is_launch, is_wait
from moe_compile.journal.reasons import Reason
from moe_compile.plan.chunk_numbers import LAST_BITS
from moe_compile.proof.kernel_bits import KernelBits, bits_by
from moe_compile.report.process_report import exchanges_of
from passes.pipeline import DYNAMO, run_level
from tests.capacity_layers import DeepSpeed, GShardEinsum, NarrowExperts, Tutel
from tests.capture import dynamo_graphs, state
from tests.slow_parameters import slow_but

WIDTH, HIDDEN, LOCAL, TOP_K = 16, 32, 4, 2


def graph_of(style, group, local=LOCAL):
    layer = style(WIDTH, HIDDEN, local, TOP_K, 1.0, group)
    x = torch.randn(32, WIDTH, requires_grad=True)
    (gm,) = dynamo_graphs(layer, x)
    return gm


def rewritten(style, group, **options):
    gm, planned = graph_of(style, group), state(**options)
    run_level(DYNAMO, gm.graph, planned)
    gm.graph.lint()
    return gm.graph, planned


@pytest.mark.parametrize("num_chunks", slow_but([3], (2, 3)))
def test_all_chunks_are_launched_before_the_first_is_waited_for(fake_ranks, num_chunks):
    graph, planned = rewritten(DeepSpeed, fake_ranks, chunks=num_chunks)
    order = [node for node in graph.nodes if is_launch(node) or is_wait(node)]
    sent, others = order[:num_chunks], order[num_chunks:]
    assert all(map(is_launch, sent))
    assert [is_launch(node) for node in others] == [False, True, False] * num_chunks
    (one,) = planned.regions
    assert (one.plan.num_chunks, planned.plan.regions["capacity"]) == (num_chunks, (one.plan,))
    assert len({str(node.meta["custom"]) for node in order if is_launch(node)}) == 1


def test_a_chunk_runs_its_own_experts_alone(fake_ranks):
    before = [n for n in graph_of(DeepSpeed, fake_ranks).graph.nodes if "linear" in str(n.target)]
    graph, _ = rewritten(DeepSpeed, fake_ranks, chunks=3)
    after = [n for n in graph.nodes if "linear" in str(n.target)]
    assert [n.args[1].name for n in after] == [n.args[1].name for n in before]


@pytest.mark.parametrize(
    "style", slow_but([Tutel], (GShardEinsum, Tutel)), ids=lambda s: s.__name__
)
def test_weights_are_cut_by_one_split_each(fake_ranks, style):
    """So that a weight's gradient is one concatenation, and no sum over chunks."""
    graph, _ = rewritten(style, fake_ranks, chunks=3)
    weights = [n for n in graph.find_nodes(op="placeholder") if "_w" in n.name or "_b" in n.name]
    assert len(weights) > 1
    for weight in weights:
        (reader,) = weight.users
        (split,) = reader.users
        assert "split" in str(split.target), weight.name


def test_what_a_cpu_rounds_by_position_runs_in_chunks_and_is_told(fake_ranks):
    """SiLU of 33 hidden numbers in 16 slots: no whole vectors, and no aligned products."""
    _, planned = rewritten(NarrowExperts, fake_ranks, chunks=2)
    (one,) = planned.regions
    assert (one.plan.num_chunks, one.left["chunks"].reason) == (1, Reason.MAY_ROUND)
    with bits_by(KernelBits()):
        _, compilation = rewrite(graph_of(NarrowExperts, fake_ranks), state(chunks=2).config)
    (region,) = compilation.regions
    assert (region.num_chunks, region.verdict) == (2, "chunked")
    assert any(remark.startswith(LAST_BITS) for remark in region.remarks)


@pytest.mark.parametrize(
    "asked",
    slow_but(
        [{"chunks": 2, "chunk_by": "tokens"}], ({"chunks": 8}, {"chunks": 2, "chunk_by": "tokens"})
    ),
    ids=str,
)
def test_what_it_cannot_do_is_told(fake_ranks, asked):
    _, planned = rewritten(DeepSpeed, fake_ranks, **asked)
    (one,) = planned.regions
    clamped = "chunk_by" not in asked
    assert one.plan.num_chunks == (LOCAL if clamped else 1)
    reason = Reason.FEW_EXPERTS if clamped else Reason.BY_CAPACITY
    assert one.left["chunks"].reason is reason


@pytest.mark.parametrize("edges", slow_but(["auto"], ("load", "auto")))
def test_edges_by_load_are_even_ones_where_a_capacity_says_how_many_rows(fake_ranks, edges):
    gm, config = graph_of(DeepSpeed, fake_ranks), state(chunks=2, chunk_edges=edges).config
    _, compilation = rewrite(gm, dataclasses.replace(config, strict=True))
    (region,) = compilation.regions
    assert (region.num_chunks, region.chunk_edges, region.to_do) == (2, "even", ())
    said = f"as many experts in each chunk: {Reason.ALREADY_DONE.value} (by its capacity every "
    assert any(remark.startswith(said) for remark in region.remarks)


def test_auto_goes_by_price_where_ranks_promise_equal_tokens(fake_ranks):
    _, planned = rewritten(DeepSpeed, fake_ranks, chunks="auto", equal_tokens=True)
    (one,) = planned.regions
    assert one.decision is not None, one.not_priced
    assert one.decision.chosen.candidate.num_chunks == one.plan.num_chunks


def test_the_report_says_that_it_is_one_by_capacity_and_reads_nothing(fake_ranks):
    _, compilation = rewrite(graph_of(DeepSpeed, fake_ranks), state(chunks=2).config)
    (region,) = compilation.regions
    assert (region.sized_by, region.verdict, region.num_host_reads) == ("capacity", "chunked", 0)
    (exchange,) = exchanges_of(compilation)
    assert exchange.is_found and "by capacity" in exchange.what and "2 chunks" in exchange.what
