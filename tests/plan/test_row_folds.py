"""Passes over rows that are spared where an exchange in eight bits packs and unpacks them."""

import dataclasses

import pytest

from moe_compile.cost.hop_shape import HopShape
from moe_compile.cost.region_work import RegionWork, Work
from moe_compile.cost.tasks import COMPUTE
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.region_tasks import tasks_of
from moe_compile.plan.row_folds import NO_FOLDS, folds_of, row_folds, unpacked_bytes
from tests.plan.test_region_price import UNIT, compute, exchange, price

ROWS = 100e3
EIGHT = Candidate(dispatch_wire="fp8")


def gather(need, **more):
    """Return a gather of as many bytes as it reads."""
    needs = () if need is None else (need,)
    return Work(name="index", needs=needs, nbytes=2 * ROWS, written=ROWS, moves_rows=True, **more)


GATHERED = [gather(None), exchange(100, "dispatch", 0, rows=ROWS), gather(1, is_chunked=True)]
OTHERS = [dataclasses.replace(w, moves_rows=False) for w in GATHERED]


def all_packed(work):
    return 0.5 if work.exchange else 1.0


def test_gathers_before_and_behind_are_done_by_the_kernels_that_pack():
    """Rows are neither written before they are packed nor read once they are unpacked."""
    folds = row_folds(GATHERED, all_packed)
    assert (folds.gathered, folds.permuted) == ({1}, {1})
    assert folds.spared == {0: ROWS, 2: ROWS}
    assert not row_folds(OTHERS, all_packed).spared
    found, other = (price(w, EIGHT, wire_shares={"fp8": 0.5}) for w in (GATHERED, OTHERS))
    assert other == pytest.approx(200 + 150 + 50 + 150 + 200)
    assert found == pytest.approx(other - 4 * 100)


def test_rows_that_something_else_reads_are_written():
    read = [*GATHERED, compute(5, 0)]
    assert row_folds(read, all_packed).gathered == set()
    came = [*GATHERED, compute(5, 1)]
    assert row_folds(came, all_packed).permuted == set()


def test_chunks_that_nothing_reads_apart_are_unpacked_once_they_are_joined():
    """Messages, half as long, are read and written, and read; rows are written."""
    works = [exchange(100, "combine", rows=ROWS), compute(5, 0)]
    two = Candidate(num_chunks=2, combine_wire="fp8")
    sort, packed, sent = 0.0, 100 + 25, 25
    found = price(works, two, wire_shares={"fp8": 0.5})
    assert found == pytest.approx(sort + packed + packed + sent + (50 + 50 + 50 + 100) + 5)


def quantise(need, **more):
    """Return what reads rows of two bytes an element and writes one of each."""
    amounts = {"nbytes": 1.5 * ROWS, "written": 0.5 * ROWS}
    return Work(name="quantise", needs=(need,), takes_messages=True, **amounts, **more)


FED = [exchange(100, "dispatch", rows=ROWS), gather(0, is_chunked=True)]
FED += [quantise(1, is_chunked=True), compute(5, 2, is_chunked=True)]


def test_rows_that_products_alone_read_are_put_in_order_as_they_came():
    """Neither unpacked nor moved in bfloat16: half the bytes are read, and as many written."""
    folds = row_folds(FED, all_packed)
    assert (folds.fed, folds.dropped, folds.permuted) == ({0}, {1}, set())
    assert folds.spared == {2: 0.5 * ROWS}
    assert [folds.left_of(i, FED[i]).nbytes for i in (1, 2, 3)] == [0.0, ROWS, 0.0]
    assert folds.left_of(1, FED[1]).num_kernels == 0
    packed, sent, ordered = 150, 50, 100
    found = price(FED, EIGHT, wire_shares={"fp8": 0.5})
    assert found == pytest.approx(packed + sent + ordered + 5)
    two = dataclasses.replace(EIGHT, num_chunks=2)
    assert price(FED, two, wire_shares={"fp8": 0.5}) < price(FED, two)


def test_rows_that_are_quantised_where_they_are_moved_read_the_message_instead():
    """What quantises reads nothing itself: the gather in its kernel does, or it reads a message."""
    moved = dataclasses.replace(FED[1], nbytes=ROWS, num_kernels=0)
    fused = [FED[0], moved, dataclasses.replace(FED[2], nbytes=0.5 * ROWS), FED[3]]
    folds = row_folds(fused, all_packed)
    assert [folds.left_of(i, fused[i]).nbytes for i in (1, 2)] == [0.0, ROWS]
    shares = {"fp8": 0.5}
    assert price(fused, EIGHT, wire_shares=shares) == price(FED, EIGHT, wire_shares=shares)
    assert price(fused, Candidate()) < price(FED, Candidate())


def test_rows_of_zeros_behind_those_that_came_change_nothing():
    pad = Work(name="cat", needs=(0,), nbytes=ROWS, num_kernels=0, pads_rows=True, is_chunked=True)
    padded = [FED[0], pad, *FED[1:]]
    padded = [*padded[:2], *(dataclasses.replace(w, needs=(w.needs[0] + 1,)) for w in padded[2:])]
    folds = row_folds(padded, all_packed)
    assert (folds.fed, folds.dropped) == ({0}, {1, 2})
    shares = {"fp8": 0.5}
    assert price(padded, EIGHT, wire_shares=shares) == price(FED, EIGHT, wire_shares=shares)
    other = [padded[0], dataclasses.replace(pad, pads_rows=False), *padded[2:]]
    assert not row_folds(other, all_packed).fed


def test_rows_in_eight_bits_that_something_else_reads_are_unpacked_too():
    """As gradients are, for those of weights: what quantises them still reads half the bytes."""
    folds = row_folds([*FED, compute(5, 1)], all_packed)
    assert (folds.fed, folds.permuted) == (set(), {0})
    assert folds.spared == {1: ROWS, 2: 0.5 * ROWS}


@pytest.mark.parametrize(
    "change", [{"moves_rows": False}, {"takes_messages": False}], ids=["computed", "rowwise"]
)
def test_rows_that_are_computed_with_or_quantised_otherwise_feed_no_product(change):
    works = [dataclasses.replace(w, **change) for w in FED]
    folds = row_folds(works, all_packed)
    assert not folds.fed and 2 not in folds.spared
    assert not row_folds(FED, lambda _: 1.0).spared


SHAPE = HopShape(num_nodes=2, num_local=2, num_experts=8, rows_per_token=2, row_bytes=100.0)
HOPS = dataclasses.replace(EIGHT, nodes="exact")


def in_hops(works, candidate=HOPS, **more):
    """Return a region in two hops, and the folds of its forward."""
    work = RegionWork(
        forward=tuple(works),
        backward=(Work(name="dW", makes_gradient=True),),
        num_ranks=4,
        num_parts=2,
        row_bytes=ROWS,
        wire_shares={"fp8": 0.5},
        hops=SHAPE,
        **more,
    )
    return work, folds_of(work, work.forward, candidate)


def by_memory(tasks):
    """Return the bytes that tasks move."""
    return 1e3 * sum(task.us for task in tasks if task.stream == COMPUTE)


def shifted(works):
    return [dataclasses.replace(w, needs=tuple(i + 1 for i in w.needs)) for w in works]


def test_rows_of_two_hops_that_products_alone_read_are_neither_gathered_flat_nor_unpacked():
    """Nothing is gathered flat; the backward unpacks rows, and moves them as the model does."""
    sent = exchange(75, "dispatch", 0, rows=ROWS)  # 3 of 4 ranks are others
    fed = [gather(None), sent, *shifted(FED[1:])]
    work, folds = in_hops(fed)
    assert (folds.fed, folds.dropped, folds.permuted) == ({1}, {2}, set())
    assert folds.spared == {0: ROWS, 3: 0.5 * ROWS}
    assert unpacked_bytes(work, HOPS) == (1.5 + 2.0) * ROWS
    read = [*fed, compute(0.0, 1)]
    assert in_hops(read)[1].spared == {3: 0.5 * ROWS}
    other, _ = in_hops(read)
    unpacked, ordered = 1.5 * ROWS, 2 * ROWS
    found = [by_memory(tasks_of(one, HOPS, UNIT)[0]) for one in (other, work)]
    assert found[0] - found[1] == pytest.approx(unpacked + ordered)


def test_rows_that_two_hops_sum_or_that_are_changed_behind_them_feed_nothing():
    weighted = in_hops(FED, weighted=frozenset({"dispatch"}))[1]
    assert weighted == NO_FOLDS
    back = [dataclasses.replace(FED[0], exchange="combine"), *FED[1:]]
    summed = dataclasses.replace(HOPS, nodes="rounded", combine_wire="fp8")
    assert in_hops(back, summed)[1] == NO_FOLDS
    assert in_hops(back, dataclasses.replace(summed, nodes="exact"))[1].fed == {0}  # goes flat


def test_the_backward_unpacks_the_rows_of_the_forward_once_for_gradients_of_weights():
    gradient = Work(name="dW", makes_gradient=True)
    region = RegionWork(
        forward=tuple(FED),
        backward=(gradient,),
        num_ranks=2,
        num_parts=2,
        row_bytes=ROWS,
        wire_shares={"fp8": 0.5},
    )
    assert unpacked_bytes(region, EIGHT) == 1.5 * ROWS
    assert unpacked_bytes(region, Candidate(combine_wire="fp8")) == 0.0
    sort = Work(name="sort", nbytes=ROWS / 8, written=ROWS / 16)
    for again in ((gather(None), quantise(0)), (sort, gather(0), quantise(1))):
        backward = (*again, dataclasses.replace(gradient, needs=(len(again) - 1,)))
        assert unpacked_bytes(dataclasses.replace(region, backward=backward), EIGHT) == 0.0
    made = Work(name="slice_backward", nbytes=2 * ROWS, written=ROWS)
    other = (made, gather(0), quantise(1), gradient)
    assert unpacked_bytes(dataclasses.replace(region, backward=other), EIGHT) == 1.5 * ROWS
    assert unpacked_bytes(dataclasses.replace(region, backward=()), EIGHT) == 0.0
    wires = {"wire_shares": {"fp8": 0.5}}
    whole = price(FED, EIGHT, backward=[gradient], **wires) - price(FED, EIGHT, **wires)
    assert whole == pytest.approx(150)
