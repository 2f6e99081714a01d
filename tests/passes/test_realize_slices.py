"""Values that operators read slices of are written once; of what is read once nothing changes."""

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ComputedBuffer
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from passes.realize_slices import RealizeSlices
from tests.capture import state

ROWS = torch.randn(96, 64, dtype=torch.bfloat16)
PLACES = torch.arange(96)
WEIGHTS = torch.randn(2, 64, 64, dtype=torch.bfloat16)
ENDS = torch.tensor([32, 64], dtype=torch.int32)


def product(rows):
    return torch._grouped_mm(rows, WEIGHTS, offs=ENDS)


def gate_and_up(rows, places):
    chosen = rows[places][:64]
    return product(chosen), product(chosen)


def two_runs(rows, places):
    first, second = (rows[places] * 2).split([64, 32])
    return product(first), product(second)


def gate_beside_more(rows, places):
    chosen = rows[places]
    return product(chosen[:64]), chosen.sum(0)


def gate_alone(rows, places):
    return product(rows[places][:64])


def whole(rows, places):
    chosen = rows[places]
    return product(chosen), product(chosen)


def lowered(program):
    """Return what the pass chose, and how often rows are written by Inductor's own code then."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = [mode.from_tensor(value) for value in (ROWS, PLACES)]
        gm = make_fx(program, select_decomp_table())(*inputs)
        applied = RealizeSlices().run(gm.graph, state()).applied
        graph = GraphLowering(gm)
        with V.set_graph_handler(graph), V.set_fake_mode(mode):
            graph.run(*inputs)
    written = [op for op in graph.operations if isinstance(op, ComputedBuffer)]
    return applied, sum(len(buffer.get_size()) == 2 for buffer in written)


@pytest.mark.parametrize("program", [gate_and_up, two_runs, gate_beside_more])
def test_rows_that_operators_read_slices_of_are_written_once(program):
    applied, times_written = lowered(program)
    assert (len(applied), times_written) == (1, 1)


@pytest.mark.parametrize("program", [gate_alone, whole])
def test_rows_that_nobody_would_copy_are_left_as_they_are(program):
    applied, times_written = lowered(program)
    assert (len(applied), times_written) == (0, 1)
