"""Graphs of regions without host reads: even exchanges, nothing for the host, one more output."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import ROOM_AT_FIRST, ROOMS, MegaMoEConfig
from moe_compile.errors import InvalidConfig
from moe_compile.graph.query import (
    input_splits,
    is_all_to_all,
    is_integer,
    overload_name,
    tensor_of,
)
from moe_compile.ops.room_rows import MOVE_ROWS
from moe_compile.regions.token_regions import EvenForm
from moe_compile.report.region_reports import NO_READS
from moe_compile.runtime.rerun import RERUN
from passes.replay.even_rows import room_of
from tests.capture import dynamo_graphs
from tests.padded_layers import Checkpointed, PaddedGroups, TwoLayers

NUM_TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 32, 64, 32, 8, 2
NUM_ROWS = NUM_TOKENS * TOP_K
TO_HOST = {"aten::_local_scalar_dense", "megamoe::integers"}


def rewritten(style, group, **options):
    """Return the graph of a layer after our passes, its inputs, and the state of the passes."""
    layer = style(WIDTH, HIDDEN, EXPERTS, TOP_K, group)
    x = torch.randn(NUM_TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    gm, *_ = dynamo_graphs(layer, x)
    places = gm.graph.find_nodes(op="placeholder")
    inputs = [place.meta["example_value"] for place in places]
    given = {"host_reads": "none", "equal_tokens": True, "strict": True, "codegen": "fx"}
    state, compilation = rewrite(gm, MegaMoEConfig(**given, **options))
    return gm, inputs, state, compilation


def exchanges_of_rows(graph):
    return [n for n in graph.nodes if is_all_to_all(n) and not is_integer(n)]


@pytest.mark.parametrize(("factor", "room"), [(1.0, 32), (1.26, 41), (5.0, NUM_ROWS)])
def test_exchanges_have_equal_parts_as_long_as_the_room(fake_ranks, factor, room):
    gm, _, state, _ = rewritten(PaddedGroups, fake_ranks, row_room=factor)
    (one,) = state.experts
    assert one.plan.room == room == room_of(one.found.region, factor)
    assert [input_splits(n) for n in exchanges_of_rows(gm.graph)] == [[room, room]] * 2


@pytest.mark.parametrize(("factor", "num", "room"), [(1.0, 2, 18), (1.26, 4, 13)])
def test_a_chunk_has_a_slice_of_the_room_and_is_launched_before_the_experts(
    fake_ranks, factor, num, room
):
    """32 or 41 rows in slices, with up to one row more for each of 4 experts and each cut."""
    asked = {"row_room": factor, "chunks": num, "chunk_by": "tokens"}
    gm, _, _, compilation = rewritten(PaddedGroups, fake_ranks, **asked)
    (report,) = compilation.regions
    assert (report.verdict, report.num_chunks) == (NO_READS, num)
    assert any(f"in slices of {room}, one for each chunk" in said for said in report.remarks)
    launches = exchanges_of_rows(gm.graph)
    assert [input_splits(n) for n in launches] == [[room, room]] * 2 * num
    order = [n for n in gm.graph.nodes if n in launches or n.target is torch._grouped_mm]
    kinds = "".join("x" if n in launches else "e" for n in order)
    assert kinds == "x" * num + "eeex" * num


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    more=st.integers(0, 3),
    num_chunks=st.integers(1, 8),
)
def test_rows_that_have_room_have_it_in_chunks(counts, more, num_chunks):
    region = SimpleNamespace(num_local_experts=len(counts))
    room = max(1, sum(counts)) + more
    form = EvenForm(region=region, needs=None, room=room, num_chunks=num_chunks)
    for c in range(num_chunks):
        share = sum(n * (c + 1) // num_chunks - n * c // num_chunks for n in counts)
        assert share <= form.slice_room
    assert form.slice_room <= -(-room // num_chunks) + len(counts)


def test_the_number_of_chunks_follows_from_prices_where_gradients_may_round(fake_ranks):
    """Exchanges of buffers have a price; so have chunks of tokens, and no others."""
    found = {}
    for numerics in ("exact", "bounded"):
        _, _, state, _ = rewritten(PaddedGroups, fake_ranks, numerics=numerics, row_room=1.5)
        (found[numerics],) = state.experts
    exact, bounded = found["exact"].decision, found["bounded"].decision
    assert [one.candidate.num_chunks for one in exact.ranked] == [1]
    assert sorted(one.candidate.num_chunks for one in bounded.ranked) == [1, 2, 4, 8]
    assert {one.candidate.chunk_by for one in bounded.ranked} == {"tokens"}
    assert found["bounded"].plan.num_chunks == bounded.chosen.candidate.num_chunks


@pytest.mark.parametrize(
    ("style", "options"),
    [(PaddedGroups, {}), (TwoLayers, {}), (PaddedGroups, {"chunks": 2, "chunk_by": "tokens"})],
)
def test_neither_forward_nor_backward_reads_on_the_host(fake_ranks, style, options):
    gm, inputs, state, compilation = rewritten(style, fake_ranks, **options)
    num_chunks = options.get("chunks", 1)
    assert state.notes_overflow and not any(r.num_host_reads for r in compilation.regions)
    graphs = trace_both(gm, inputs, state)
    for graph in (graph_module.graph for graph_module in graphs):
        assert not {overload_name(n) for n in graph.nodes} & TO_HOST
        values = [tensor_of(n) for n in graph.nodes]
        assert not any(free_unbacked_symbols(value) for value in values if value is not None)
        assert len(exchanges_of_rows(graph)) == 2 * num_chunks * len(compilation.regions)


@pytest.mark.parametrize("numerics", ["exact", "bounded"])
def test_auto_runs_with_the_room_at_hand_and_prices_the_others(fake_ranks, numerics):
    """Less room is less time, down to the program with reads; one with half of it is priced so."""
    RERUN.room = 1.25
    try:
        _, _, state, _ = rewritten(
            PaddedGroups, fake_ranks, row_room="auto", numerics=numerics, hardware="h100"
        )
        (one,) = state.experts
        assert one.plan.room == room_of(one.found.region, 1.25)
    finally:
        RERUN.room = ROOM_AT_FIRST
    (times,) = state.room_times
    assert len(times.us) == len(ROOMS) and times.reads_us < times.us[0]
    up_to_all = [us for us, room in zip(times.us, ROOMS, strict=True) if room <= 2]
    assert up_to_all == sorted(set(up_to_all)) and set(times.us) == set(up_to_all)
    if one.decision is not None:
        chosen = one.decision.chosen
        assert times.us[ROOMS.index(1.25)] == pytest.approx(chosen.us)


def test_a_stated_room_prices_no_other(fake_ranks):
    _, _, state, _ = rewritten(PaddedGroups, fake_ranks, row_room=1.5)
    assert state.room_times == [None]


def test_one_more_output_tells_of_all_regions(fake_ranks):
    gm, *_ = rewritten(TwoLayers, fake_ranks)
    (outputs,) = gm.graph.output_node().args
    assert len(outputs) == 2 and outputs[1].target is torch.maximum
    assert len(gm.graph.find_nodes(op="call_function", target=MOVE_ROWS)) == 2 * 4


def test_regions_inside_of_a_checkpoint_tell_too(fake_ranks):
    gm, _, state, _ = rewritten(Checkpointed, fake_ranks)
    (body,) = gm.children()
    (outputs,), (inner,) = gm.graph.output_node().args, body.graph.output_node().args
    assert state.notes_overflow and (len(outputs), len(inner)) == (2, 2)
    assert outputs[1].args[1] == 1


@pytest.mark.parametrize(
    "other",
    [{"dispatch": "all_gather"}, {"nodes": "exact"}, {"combine_wire": "fp8"}],
    ids=str,
)
def test_rows_that_travel_otherwise_are_refused_beside_it(other):
    (name,) = other
    with pytest.raises(InvalidConfig, match=f"leave out {name}, or leave out host_reads"):
        MegaMoEConfig(host_reads="none", **other)
    MegaMoEConfig(host_reads="needed", **other)


@pytest.mark.parametrize("axis", ["auto", "experts"])
def test_chunks_of_experts_are_refused_beside_it(axis):
    with pytest.raises(InvalidConfig, match='write chunk_by = "tokens" too'):
        MegaMoEConfig(host_reads="none", chunks=2, chunk_by=axis)
    MegaMoEConfig(host_reads="none", chunks=2, chunk_by="tokens")
    MegaMoEConfig(host_reads="none", chunks=1, chunk_by=axis)


@pytest.mark.parametrize("room", [0, -1.0, float("inf"), "automatic", True])
def test_a_room_that_is_no_factor_is_refused(room):
    with pytest.raises(
        InvalidConfig, match=r'row_room .*; write "auto" or a number above 0, 1\.5 for example'
    ):
        MegaMoEConfig(host_reads="none", row_room=room)
