"""Numbers stand for sizes with symbols: they divide, and are equal, just where the sizes do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_compile.dims.factors import Lost, SizeNumbers
from moe_compile.graph.query import expression_of
from tests.capture import dynamo_graphs


def numbers_and_sizes():
    """Return the numbers of a graph with two sizes of any number, and these."""

    def program(x):
        return x * 2

    x = torch.ones(6, 10, 3)
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(x, dim)
    (gm,) = dynamo_graphs(program, x)
    (given,) = (n for n in gm.graph.find_nodes(op="placeholder") if "x" in n.name)
    return SizeNumbers(gm.graph), given.meta["example_value"].shape


NUMBERS, (FIRST, SECOND, _) = numbers_and_sizes()
PRODUCTS = st.tuples(st.integers(1, 12), st.integers(0, 2), st.integers(0, 2))


def product(factors):
    number, first, second = factors
    return number * FIRST**first * SECOND**second


@given(PRODUCTS, PRODUCTS)
def test_numbers_divide_where_sizes_do_for_all_values(one, other):
    left, right = (NUMBERS.product_of(product(factors)) for factors in (one, other))
    divides = one[0] % other[0] == 0 and one[1] >= other[1] and one[2] >= other[2]
    assert (left % right == 0) == divides
    assert (left == right) == (one == other)


@given(PRODUCTS)
def test_a_size_is_found_by_its_number(factors):
    size = product(factors)
    found = NUMBERS.size(NUMBERS.product_of(size))
    assert expression_of(found) == expression_of(size)


@pytest.mark.parametrize("size", [FIRST + 1, FIRST // 2, FIRST + SECOND, FIRST - 2])
def test_other_sizes_are_not_known(size):
    with pytest.raises(Lost, match="known at compile time or be products"):
        NUMBERS.product_of(size)


def test_a_part_is_no_product_of_sizes():
    part = NUMBERS.number_of((FIRST + 1) // 2)
    assert NUMBERS.factors(4 * part) == (4, [part])
    with pytest.raises(Lost):
        NUMBERS.product_of((FIRST + 1) // 2)
