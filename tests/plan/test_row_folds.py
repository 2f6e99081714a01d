"""Passes over rows that are spared where an exchange in eight bits packs and unpacks them."""

import dataclasses

import pytest

from moe_compile.cost.region_work import Work
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.region_tasks import row_folds
from tests.plan.test_region_price import compute, exchange, price

ROWS = 100e3
EIGHT = Candidate(dispatch_wire="fp8")


def gather(need, **more):
    """Return a gather of as many bytes as it reads."""
    needs = () if need is None else (need,)
    return Work(name="index", needs=needs, nbytes=2 * ROWS, written=ROWS, moves_rows=True, **more)


GATHERED = [gather(None), exchange(100, "dispatch", 0, rows=ROWS), gather(1, is_chunked=True)]
OTHERS = [dataclasses.replace(w, moves_rows=False) for w in GATHERED]


def all_packed(work):
    return bool(work.exchange)


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
