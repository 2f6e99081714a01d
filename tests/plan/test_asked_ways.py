"""What options leave to the planner: of all ways to run a region, those it may choose."""

import pytest

from moe_compile.config import MegaMoEConfig
from moe_compile.cost.region_work import RegionWork, Work
from moe_compile.plan.candidates import Candidate, list_candidates
from moe_compile.plan.decide import experts_rule, wires_tried


def allowed(num_parts=8, wires=("fp8",), kept=(), may_split_rows=True, **options):
    """Return the ways that the options allow, exchanges all to all."""
    work = RegionWork(
        forward=(Work(name="experts", operations=1.0),),
        num_ranks=8,
        num_parts=num_parts,
        row_bytes=1.0,
        wire_shares=dict.fromkeys(wires, 0.5),
        never_packed=frozenset(kept),
    )
    config = MegaMoEConfig(equal_tokens=True, **options)
    rule = experts_rule(config, work, may_split_rows=may_split_rows)
    ways = list_candidates(work, ("experts", "tokens"), wires_tried(config))
    assert ways[0] == Candidate()
    return [way for way in ways if rule(way)]


def chunks(ways):
    return {(way.num_chunks, way.chunk_by) for way in ways}


def wires(ways):
    return {(way.dispatch_wire, way.combine_wire) for way in ways}


def test_chunks_are_of_tokens_where_all_of_them_is_open_and_sums_may_have_another_order():
    either = {(num, axis) for num in (2, 4, 8) for axis in ("experts", "tokens")}
    assert chunks(allowed(chunks="auto", numerics="bounded")) == {(1, "experts"), *either}
    for closed in (
        {"numerics": "exact"},
        {"chunk_by": "experts"},
        {"chunks": 2},
        {"chunk_edges": "auto"},
        {"may_split_rows": False},
    ):
        ways = allowed(**{"chunks": "auto", "numerics": "bounded", **closed})
        assert {axis for _, axis in chunks(ways)} == {"experts"}, closed


def test_auto_leaves_every_divisor_and_nothing_that_changes_bits():
    ways = allowed(chunks="auto")
    assert chunks(ways) == {(num, "experts") for num in (1, 2, 4, 8)}
    assert wires(ways) == {("same", "same")}
    assert chunks(allowed(6, chunks="auto")) == {(1, "experts"), (2, "experts")}


def test_a_number_that_is_asked_for_is_the_only_one():
    assert chunks(allowed(chunks=4, dispatch_wire="auto")) == {(4, "experts")}


@pytest.mark.parametrize(("num_parts", "asked"), [(6, 3), (6, 4)])
def test_one_chunk_stands_for_a_number_that_is_not_tried(num_parts, asked):
    """Wires are then priced whole: the region runs as asked, which no way is."""
    assert chunks(allowed(num_parts, chunks=asked, dispatch_wire="auto")) == {(1, "experts")}


def test_chunks_of_tokens_are_chosen_only_where_they_are_asked_for():
    ways = allowed(chunks="auto", chunk_by="tokens")
    assert {axis for num, axis in chunks(ways) if num > 1} == {"tokens"}


@pytest.mark.parametrize(
    ("dispatch", "combine", "found"),
    [
        ("auto", "auto", {(a, b) for a in ("same", "fp8") for b in ("same", "fp8")}),
        ("auto", "same", {("same", "same"), ("fp8", "same")}),
        ("fp8", "auto", {("fp8", "same"), ("fp8", "fp8")}),
        ("same", "fp8", {("same", "fp8")}),
        ("fp8_forward", "auto", {("fp8_forward", "same"), ("fp8_forward", "fp8")}),
    ],
)
def test_each_wire_is_what_its_option_says_or_either_by_auto(dispatch, combine, found):
    options = {"chunks": 2, "dispatch_wire": dispatch, "combine_wire": combine}
    assert wires(allowed(**options, numerics="lossy")) == found


@pytest.mark.parametrize("numerics", ["exact", "bounded"])
def test_auto_sends_no_eight_bits_unless_numerics_is_lossy(numerics):
    ways = allowed(chunks=2, dispatch_wire="auto", combine_wire="fp8", numerics=numerics)
    assert wires(ways) == {("same", "fp8")}


def test_a_wire_the_region_cannot_have_is_not_tried():
    ways = allowed(wires=(), chunks="auto", dispatch_wire="fp8", combine_wire="auto")
    assert wires(ways) == {("same", "same")}


@pytest.mark.parametrize("option", ["auto", "fp8"])
def test_an_exchange_whose_rows_must_not_be_rounded_keeps_its_own(option):
    options = {"chunks": 2, "dispatch_wire": option, "combine_wire": option, "numerics": "lossy"}
    assert {combine for _, combine in wires(allowed(kept=("combine",), **options))} == {"same"}
    assert "fp8" in {dispatch for dispatch, _ in wires(allowed(kept=("combine",), **options))}


@pytest.mark.parametrize(
    ("changes", "is_lossy"),
    [
        ({}, False),
        ({"num_chunks": 4}, False),
        ({"num_chunks": 4, "chunk_by": "heads"}, False),
        ({"num_chunks": 4, "chunk_by": "tokens"}, True),
        ({"chunk_by": "tokens"}, False),
        ({"dispatch_wire": "fp8"}, True),
        ({"combine_wire": "fp8"}, True),
    ],
)
def test_sums_in_parts_and_rows_in_eight_bits_change_bits(changes, is_lossy):
    work = RegionWork(forward=(), num_ranks=2, num_parts=4, row_bytes=1.0)
    assert Candidate(**changes).is_lossy(work) is is_lossy


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"chunk_by": "heads", "num_chunks": 2}, {"attention_chunks": 2}),
        ({"num_chunks": 4}, {"chunks": 4}),
        ({"num_chunks": 4, "chunk_edges": "load"}, {"chunks": 4, "chunk_edges": "load"}),
        ({"nodes": "exact", "hop_slices": 2}, {"nodes": "exact", "hop_slices": 2}),
        ({"dispatch": "all_gather"}, {"dispatch": "all_gather"}),
        ({"dispatch_wire": "fp8"}, {"dispatch_wire": "fp8"}),
    ],
)
def test_the_options_of_a_candidate_make_a_configuration_that_asks_for_it(changes, options):
    told = Candidate(**changes).options
    config = MegaMoEConfig(**told)
    assert {name: getattr(config, name) for name in options} == options
    assert "hop_slices" in told or config.hop_slices == "auto"
