"""Gathers read the rows they are asked for, and sums of places each row once."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.cost.amounts import amounts_of
from moe_compile.cost.sizes import NominalSizes
from moe_compile.ops.quantized_rows import (
    GATHER_QUANTIZE_PACK,
    GATHER_ROWS,
    UNPACK_DEQUANTIZE_PERMUTE,
)
from moe_compile.ops.row_sums import DOTS_OF_PLACES, SUM_OF_PLACES
from moe_compile.ops.wire_format import row_bytes

NUM_ROWS, WIDTH = 12, 128
ROWS = torch.ones(NUM_ROWS, WIDTH, dtype=torch.bfloat16)


def bytes_read(program, *inputs):
    """Return the bytes that are read of the first of `inputs`."""
    graph = make_fx(program, tracing_mode="fake")(*inputs).graph
    sizes = NominalSizes({})
    sizes.learn(graph)
    first = next(iter(graph.nodes))
    return sum(amounts_of(node, sizes).read.get(first, 0.0) for node in graph.nodes)


@pytest.mark.parametrize(("number", "most"), [(6, 2), (4, 8), (5, 3), (2, 1)])
def test_sums_of_places_read_each_row_once(number, most):
    places = torch.zeros(number, most, dtype=torch.int64)
    others = torch.ones(number, WIDTH, dtype=torch.bfloat16)

    def summed(rows, places):
        return SUM_OF_PLACES([rows], places, torch.float32)

    def in_two(rows, places, later):
        return SUM_OF_PLACES([rows, later], places, torch.float32)

    def dots(rows, places, others):
        return DOTS_OF_PLACES([rows], places, others, torch.float32)

    every = number * most
    assert bytes_read(summed, ROWS, places) == pytest.approx(min(NUM_ROWS, every) * WIDTH * 2)
    assert bytes_read(dots, ROWS, places, others) == bytes_read(summed, ROWS, places)
    part = bytes_read(in_two, ROWS[:4], places, ROWS[4:])
    assert part == pytest.approx(min(4, every * 4 / NUM_ROWS) * WIDTH * 2)


@pytest.mark.parametrize("asked", [3, NUM_ROWS, 20])
def test_packing_and_unpacking_read_the_rows_that_are_asked_for(asked):
    index = torch.zeros(asked, dtype=torch.int64)
    message = torch.ones(NUM_ROWS, row_bytes(WIDTH), dtype=torch.uint8)
    read = min(asked, NUM_ROWS)
    assert bytes_read(GATHER_QUANTIZE_PACK, ROWS, index) == read * WIDTH * 2
    assert bytes_read(GATHER_ROWS, ROWS, index) == read * WIDTH * 2

    def unpacked(message, index):
        return UNPACK_DEQUANTIZE_PERMUTE(message, index, WIDTH, torch.bfloat16)

    assert bytes_read(unpacked, message, index) == read * row_bytes(WIDTH)


def test_packing_without_an_index_reads_all_rows():
    assert bytes_read(lambda rows: GATHER_QUANTIZE_PACK(rows), ROWS) == NUM_ROWS * WIDTH * 2
