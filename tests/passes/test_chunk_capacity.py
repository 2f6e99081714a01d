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
from moe_compile.testing.programs.choices import Across, Act, Extra, Fill, Sent
from moe_compile.testing.programs.grammar import Capacity
from passes.pipeline import DYNAMO, run_level
from tests.capture import dynamo_graphs, state
from tests.layer_programs import layer_of
from tests.slow_parameters import slow_but

LOCAL = 4
LOOP = Capacity(local=LOCAL, top_k=2, across=Across.CHUNKED)
EINSUM = Capacity(local=LOCAL, top_k=2)
BIASED = Capacity(
    local=LOCAL, top_k=2, fill=Fill.INDEX_COPY, sent=Sent.RANKS, across=Across.MATMUL,
    extras=frozenset({Extra.BIAS}),
)  # fmt: skip


def graph_of(layer, hidden=32):
    x = torch.randn(32, 16, requires_grad=True)
    (gm,) = dynamo_graphs(layer_of(layer, hidden=hidden), x)
    return gm


def rewritten(layer, hidden=32, **options):
    gm, planned = graph_of(layer, hidden), state(**options)
    run_level(DYNAMO, gm.graph, planned)
    gm.graph.lint()
    return gm.graph, planned


@pytest.mark.parametrize("num_chunks", slow_but([3], (2, 3)))
def test_all_chunks_are_launched_before_the_first_is_waited_for(fake_ranks, num_chunks):
    graph, planned = rewritten(LOOP, chunks=num_chunks)
    order = [node for node in graph.nodes if is_launch(node) or is_wait(node)]
    sent, others = order[:num_chunks], order[num_chunks:]
    assert all(map(is_launch, sent))
    assert [is_launch(node) for node in others] == [False, True, False] * num_chunks
    (one,) = planned.regions
    assert (one.plan.num_chunks, planned.plan.regions["capacity"]) == (num_chunks, (one.plan,))
    assert len({str(node.meta["custom"]) for node in order if is_launch(node)}) == 1


def weights_of(products):
    return [n.args[1].args[0].name for n in products]


def test_a_chunk_runs_its_own_experts_alone(fake_ranks):
    before = [n for n in graph_of(LOOP).graph.nodes if "linear" in str(n.target)]
    graph, _ = rewritten(LOOP, chunks=3)
    after = [n for n in graph.nodes if "linear" in str(n.target)]
    assert weights_of(after) == weights_of(before)


@pytest.mark.parametrize(
    "layer", slow_but([BIASED], (EINSUM, BIASED)), ids=lambda layer: layer.across.name
)
def test_weights_are_cut_by_one_split_each(fake_ranks, layer):
    """So that a weight's gradient is one concatenation, and no sum over chunks."""
    graph, _ = rewritten(layer, chunks=3)
    weights = [n for n in graph.find_nodes(op="placeholder") if "_w" in n.name or "_b" in n.name]
    assert len(weights) > 1
    for reader in weights:
        while "split" not in str(reader.target):
            (reader,) = reader.users


def test_what_a_cpu_rounds_by_position_runs_in_chunks_and_is_told(fake_ranks):
    """SiLU of 33 hidden numbers in 16 slots: no whole vectors, and no aligned products."""
    narrow = Capacity(
        local=LOCAL, top_k=2, across=Across.OUTERMOST, act=Act.SILU, extras=frozenset({Extra.GATED})
    )
    _, planned = rewritten(narrow, 33, chunks=2)
    (one,) = planned.regions
    assert (one.plan.num_chunks, one.left["chunks"].reason) == (1, Reason.MAY_ROUND)
    with bits_by(KernelBits()):
        _, compilation = rewrite(graph_of(narrow, 33), state(chunks=2).config)
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
    _, planned = rewritten(LOOP, **asked)
    (one,) = planned.regions
    clamped = "chunk_by" not in asked
    assert one.plan.num_chunks == (LOCAL if clamped else 1)
    reason = Reason.FEW_EXPERTS if clamped else Reason.BY_CAPACITY
    assert one.left["chunks"].reason is reason


@pytest.mark.parametrize("edges", slow_but(["auto"], ("load", "auto")))
def test_edges_by_load_are_even_ones_where_a_capacity_says_how_many_rows(fake_ranks, edges):
    gm, config = graph_of(LOOP), state(chunks=2, chunk_edges=edges).config
    _, compilation = rewrite(gm, dataclasses.replace(config, strict=True))
    (region,) = compilation.regions
    assert (region.num_chunks, region.chunk_edges, region.to_do) == (2, "even", ())
    said = f"every chunk has the same number of experts: {Reason.ALREADY_DONE.value} (by its "
    assert any(remark.startswith(said) for remark in region.remarks)


def test_auto_goes_by_price_where_ranks_promise_equal_tokens(fake_ranks):
    _, planned = rewritten(LOOP, chunks="auto", equal_tokens=True)
    (one,) = planned.regions
    assert one.decision is not None, one.not_priced
    assert one.decision.chosen.candidate.num_chunks == one.plan.num_chunks


def test_the_report_says_that_it_is_one_by_capacity_and_reads_nothing(fake_ranks):
    _, compilation = rewrite(graph_of(LOOP), state(chunks=2).config)
    (region,) = compilation.regions
    assert (region.sized_by, region.verdict, region.num_host_reads) == ("capacity", "chunked", 0)
    (exchange,) = exchanges_of(compilation)
    assert exchange.is_found and "by capacity" in exchange.what and "2 chunks" in exchange.what
