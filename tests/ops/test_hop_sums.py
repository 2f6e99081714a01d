"""Sums of rows by place: which rows, in which order, and how they round."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_compile.ops.row_sums import SUM_OF_PLACES, wide_type
from moe_compile.ops.two_hops import places_of


def slots_of(index, by=None):
    """Return which of the rows of its number each of `index` is, in order of `by`, by a loop."""
    order = sorted(range(len(index)), key=(by or range(len(index))).__getitem__)
    slots, found = {}, [0] * len(index)
    for row in order:
        found[row] = slots.setdefault(index[row], 0)
        slots[index[row]] += 1
    return torch.tensor(found, dtype=torch.int64)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=12), st.integers(0, 2))
def test_places_are_where_a_number_stands_in_order(drawn, more):
    index, by = [number for number, _ in drawn], [key for _, key in drawn]
    most = max([1, *map(index.count, range(5))]) + more
    places = places_of(torch.tensor(index, dtype=torch.int64), slots_of(index, by), 5, most)
    for number, row in enumerate(places.tolist()):
        stands = sorted((i for i, n in enumerate(index) if n == number), key=by.__getitem__)
        assert row == stands + [-1] * (most - len(stands))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rows_are_added_from_the_first_on_in_a_wide_type(dtype):
    rows = torch.randn(20, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    index = torch.tensor([0, 3, 3, 1, 3, 0, 3, 1, 3, 2] * 2)
    wide, places = wide_type(dtype), places_of(index, slots_of(index.tolist()), 4, 10)
    found, rounded = (SUM_OF_PLACES([rows], places, to) for to in (wide, torch.bfloat16))
    assert (found.dtype, rounded.dtype) == (wide, torch.bfloat16)
    assert torch.equal(rounded, found.bfloat16())
    for number in range(4):
        *_, expected = itertools.accumulate(rows[index == number].to(wide), torch.add)
        assert torch.equal(found[number], expected)


def test_a_sum_of_one_row_is_that_row_to_the_sign_of_its_zeros():
    rows = torch.tensor([[-0.0, 1.0], [float("nan"), float("inf")]])
    places = places_of(torch.tensor([0, 2]), torch.tensor([0, 0]), 3, 2)
    found = SUM_OF_PLACES([rows], places, torch.float32)
    assert torch.equal(found[0], rows[0]) and found[0, 0].signbit()
    assert found[1].tolist() == [0.0, 0.0], "no row, and not even that of others"
