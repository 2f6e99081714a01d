"""Prices told by hand: each thing a way of running adds or saves, one at a time.

A rate is one: microseconds are operations / 1e6, bytes in memory / 1e3, bytes on the link / 1e3.
"""

import dataclasses

import pytest

from moe_compile.cost.rates import CONSTANTS, Rates
from moe_compile.cost.region_work import RegionWork, Work
from moe_compile.hardware import load_profile
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.region_tasks import price_us
from tests.region_works import mirrored

UNIT = Rates(
    matmul_tflops=1.0,
    memory_gb_per_s=1.0,
    op_overhead_us=0.0,
    link_gb_per_s=1.0,
    link_latency_us=0.0,
)
WHOLE = Candidate()
TWO = Candidate(num_chunks=2)
TOKENS = Candidate(num_chunks=2, chunk_by="tokens")


def compute(us, *needs, **more):
    return Work(name="compute", needs=needs, operations=us * 1e6, **more)


def exchange(us, kind, *needs, rows=0.0):
    """Return an exchange that brings `rows` bytes."""
    sizes = {"link_bytes": us * 1e3, "written": rows}
    return Work(name=kind, needs=needs, exchange=kind, is_chunked=True, **sizes)


def price(works, candidate=WHOLE, rates=UNIT, backward=(), num_parts=2, row_bytes=0.0, **more):
    """Return the price of forward and backward."""
    phases = {"forward": tuple(works), "backward": tuple(backward)}
    work = RegionWork(**phases, num_ranks=8, num_parts=num_parts, row_bytes=row_bytes, **more)
    return price_us(work, candidate, rates)


def test_backward_follows_forward_and_has_needs_of_its_own():
    """Forward 120 of compute wait for the exchange; backward the exchange waits for 30."""
    works = [exchange(100, "dispatch"), compute(30, 0), compute(90, 0)]
    backward = [compute(30), exchange(100, "dispatch", 0), compute(90)]
    assert price(works) == pytest.approx(100 + 30 + 90)
    assert price(works, backward=backward) == pytest.approx((100 + 30 + 90) + (30 + 100))


def test_a_reader_of_the_whole_waits_for_all_chunks_and_their_join():
    """Sorted by 20, dispatched by 120; joined as they are put back: 10 read, 10 written."""
    works = [exchange(100, "dispatch", rows=10e3), compute(5, 0)]
    assert price(works, TWO, row_bytes=10e3) == pytest.approx(20 + 100 + 20 + 5)
    assert price(works, row_bytes=10e3) == pytest.approx(100 + 5)


def test_chunks_are_joined_once_however_many_read_the_whole():
    works = [exchange(100, "dispatch", rows=10e3), compute(5, 0), compute(5, 0)]
    assert price(works, TWO, row_bytes=10e3) == pytest.approx(20 + 100 + 20 + 5 + 5)


def test_an_experts_own_product_is_in_its_chunk_alone_and_whole():
    """Half of the rows after 50, the rest after 100: the second expert waits for those."""
    works = [
        exchange(100, "dispatch"),
        compute(20, 0, is_chunked=True, expert=0),
        compute(20, 0, is_chunked=True, expert=1),
    ]
    assert price(works, TWO) == pytest.approx(100 + 20)
    first = [works[0], works[1], dataclasses.replace(works[2], expert=0)]
    assert price(first, TWO) == pytest.approx(100)
    assert price(works, TOKENS) == pytest.approx(100 + 2 * 10)


def test_every_chunk_of_experts_reads_its_weights_and_those_it_cannot_slice_all():
    sliced = Work(name="gemm", weight_bytes=40e3, is_chunked=True)
    whole = dataclasses.replace(sliced, slices_weights=False)
    assert price([sliced], TWO) == pytest.approx(20 + 20)
    assert price([whole], TWO) == price([sliced], TOKENS) == pytest.approx(40 + 40)


def test_backward_makes_the_gradient_of_weights_and_token_chunks_add_theirs():
    """Forward, gradients of rows, of weights; those of slices are joined, read and written once;
    a chunk of tokens adds: two reads and a write."""
    gemm = Work(name="gemm", weight_bytes=40e3, is_chunked=True)
    backward = mirrored([gemm])
    assert price([gemm], backward=backward) == pytest.approx(40 + 40 + 40)
    assert price([gemm], TWO, backward=backward) == pytest.approx(2 * (20 + 20 + 20) + 2 * 40)
    by_tokens = price([gemm], TOKENS, backward=backward)
    assert by_tokens == pytest.approx(2 * (40 + 40 + 40 * (1 + 3)))


@pytest.mark.parametrize(("wire", "us"), [("dispatch", 50 + 200), ("combine", 100 + 100)])
def test_a_wire_in_eight_bits_halves_its_own_exchange_and_is_packed_and_unpacked(wire, us):
    """Rows are read and half as much written: 1.5 of the bytes, on each side."""
    works = [exchange(100, "dispatch"), exchange(200, "combine", 0)]
    rates = UNIT.scaled("memory_gb_per_s", 100.0)
    way = Candidate(**{f"{wire}_wire": "fp8"})
    packing = 2 * (1.5 if wire == "dispatch" else 3.0)
    found = price(works, way, rates, wire_shares={"fp8": 0.5})
    assert found == pytest.approx(us + packing)


def test_another_regions_exchange_keeps_its_wire():
    works = [dataclasses.replace(exchange(100, "other"), is_chunked=False)]
    way = Candidate(dispatch_wire="fp8", combine_wire="fp8")
    assert price(works, way, wire_shares={"fp8": 0.5}) == pytest.approx(100)


def test_compute_slows_by_the_contention_while_an_exchange_runs():
    works = [exchange(100, "dispatch"), compute(60)]
    assert price(works) == pytest.approx(100)
    assert price([exchange(100, "dispatch"), compute(80)], rates=dataclasses.replace(
        UNIT, contention=0.5
    )) == pytest.approx(100 + (80 - 100 / 1.5))  # fmt: skip


def test_an_exchange_slows_by_its_overlap_slowdown_while_compute_runs():
    """Beside 60 of compute 40 are sent; where compute is slower too, 60 beside 90."""
    works = [exchange(100, "dispatch"), compute(60)]
    slower = dataclasses.replace(UNIT, overlap_slowdown=0.5)
    assert price(works, rates=slower) == pytest.approx(60 + 60)
    both = dataclasses.replace(slower, contention=0.5)
    assert price(works, rates=both) == pytest.approx(90 + 40)


def test_an_operator_takes_the_slower_of_arithmetic_and_memory_and_its_launches():
    rates = dataclasses.replace(UNIT, op_overhead_us=5.0)
    assert rates.compute_us(7e6, 3e3, 2) == pytest.approx(2 * 5 + 7)
    assert rates.compute_us(3e6, 7e3, 1) == pytest.approx(5 + 7)


def test_every_chunks_exchange_pays_the_latency():
    rates = dataclasses.replace(UNIT, link_latency_us=9.0)
    works = [exchange(100, "dispatch")]
    assert price(works, rates=rates) == pytest.approx(9 + 100)
    assert price(works, TWO, rates) == pytest.approx(2 * (9 + 50))


def test_a_constant_is_moved_up_and_down_one_at_a_time_and_none_that_is_nothing():
    rates = dataclasses.replace(
        UNIT, op_overhead_us=2.0, uncertainty=tuple((name, 0.25) for name in CONSTANTS)
    )
    moved = list(rates.perturbed())
    stated = [name for name in CONSTANTS if getattr(rates, name)]
    assert len(moved) == 2 * len(stated)
    assert {"matmul_tflops", "op_overhead_us"} < set(stated) < set(CONSTANTS)
    for name in stated:
        found = [r for r in moved if getattr(r, name) != getattr(rates, name)]
        factors = [getattr(r, name) / getattr(rates, name) for r in found]
        assert factors == pytest.approx([1.25, 0.75])


@pytest.mark.parametrize(
    ("origin", "share"),
    [
        ("measured: on a node", 0.1),
        ("datasheet: table 2", 0.1),
        ("fitted", 0.1),
        ("literature: a paper", 0.2),
        ("computed from others", 0.2),
        ("assumed: half the peak", 0.2),
        ("said: by somebody", 0.2),
    ],
)
def test_a_rate_may_be_off_by_what_its_origin_is_worth(origin, share):
    profile = dataclasses.replace(
        load_profile("cpu"), origins={"matmul_tflops": origin, "link_gb_per_s": origin}
    )
    far = dict(Rates.of(profile, 64).uncertainty)
    assert far["matmul_tflops"] == far["link_gb_per_s"] == share
    assert far["memory_gb_per_s"] == 0.2  # nobody stated where it comes from


def test_a_nodes_link_is_assumed_whatever_is_known_of_the_network():
    measured = dict.fromkeys(CONSTANTS, "measured: once")
    profile = dataclasses.replace(load_profile("h100"), origins=measured)
    near, far = (dict(Rates.of(profile, num).uncertainty) for num in (8, 64))
    assert near["link_gb_per_s"] == near["link_latency_us"] == far["intra_node_gb_per_s"] == 0.2
    assert far["link_gb_per_s"] == far["link_latency_us"] == near["matmul_tflops"] == 0.1
