"""Gathers read the rows they are asked for, and sums of places each row once."""

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.cost.amounts import amounts_of
from moe_compile.cost.sizes import NominalSizes
from moe_compile.ops.hop_sums import SUM_OF_PLACES
from moe_compile.ops.quantized_rows import (
    GATHER_QUANTIZE_PACK,
    GATHER_ROWS,
    UNPACK_DEQUANTIZE_PERMUTE,
)
from moe_compile.ops.wire_format import row_bytes

NUM_ROWS, WIDTH = 12, 128
ROWS = torch.ones(NUM_ROWS, WIDTH, dtype=torch.bfloat16)


def bytes_read(program, *inputs, table=None):
    """Return the bytes that are read of the first of `inputs`."""
    graph = make_fx(program, tracing_mode="fake", decomposition_table=table)(*inputs).graph
    sizes = NominalSizes({})
    sizes.learn(graph)
    first = next(iter(graph.nodes))
    return sum(amounts_of(node, sizes).read.get(first, 0.0) for node in graph.nodes)


@pytest.mark.parametrize("is_decomposed", [False, True])
@pytest.mark.parametrize(("number", "most"), [(6, 2), (4, 8), (5, 3)])
def test_sums_of_places_read_each_row_once(number, most, is_decomposed):
    table = select_decomp_table() if is_decomposed else None
    places = torch.zeros(number, most, dtype=torch.int64)
    asked = number * most
    read = bytes_read(lambda rows, places: SUM_OF_PLACES(rows, places), ROWS, places, table=table)
    assert read == pytest.approx(min(NUM_ROWS, asked) * WIDTH * 2)


def test_rows_that_are_gathered_by_columns_of_no_matrix_are_read_for_each():
    index = torch.zeros(6, dtype=torch.int64)
    twice = bytes_read(lambda rows, i: rows[i] + rows[i + 1], ROWS, index)
    assert twice == 2 * 6 * WIDTH * 2


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
