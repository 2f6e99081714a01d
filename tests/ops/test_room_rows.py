"""Rows in buffers with room: indices and moves equal loops over rows, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.cost.amounts import amounts_of
from moe_compile.cost.kernel_counts import ROOM_KERNELS
from moe_compile.cost.sizes import NominalSizes
from moe_compile.ops.room_rows import COUNTS_WITHIN, MOVE_ROWS, ROOM_INDEX

COUNTS = st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4)


def slots_by_hand(runs, room, num_rows):
    """Return the slot of each row, and the row of each slot; runs are of ranks, experts, chunks."""
    num_ranks, num_chunks = len(runs), len(runs[0][0])
    slots, rows = [-1] * num_rows, [-1] * (num_chunks * num_ranks * room)
    filled, row = [[0] * num_ranks for _ in range(num_chunks)], -1
    for rank, experts in enumerate(runs):
        for chunk, length in ((c, n) for run in experts for c, n in enumerate(run)):
            for _ in range(length):
                row, place = row + 1, filled[chunk][rank]
                filled[chunk][rank] += 1
                if place < room:
                    slots[row] = (chunk * num_ranks + rank) * room + place
                    rows[slots[row]] = row
    return slots, rows


def runs_of(num_ranks, num_chunks):
    """Return a strategy of the lengths of runs, of 3 experts."""
    run = st.lists(st.integers(0, 4), min_size=num_chunks, max_size=num_chunks)
    of_rank = st.lists(run, min_size=3, max_size=3)
    return st.lists(of_rank, min_size=num_ranks, max_size=num_ranks)


RUNS = st.tuples(st.integers(1, 4), st.integers(1, 3)).flatmap(lambda sizes: runs_of(*sizes))


@given(runs=RUNS, room=st.integers(1, 6), behind=st.integers(0, 3))
def test_rows_have_the_slots_that_there_are(runs, room, behind):
    num_rows = max(1, int(torch.tensor(runs).sum()) + behind)
    found = ROOM_INDEX(torch.tensor(runs), room, num_rows)
    assert [tensor.tolist() for tensor in found] == list(slots_by_hand(runs, room, num_rows))


@given(counts=COUNTS, room=st.integers(1, 6), num_rows=st.integers(1, 9))
def test_no_index_leaves_the_rows_if_counts_tell_of_more(counts, room, num_rows):
    runs = torch.tensor(counts).unsqueeze(-1)
    slots, rows = ROOM_INDEX(runs, room, num_rows)
    assert rows.max() < num_rows and slots.max() < len(rows)


def test_a_price_counts_the_kernels_of_an_index():
    def index(counts):
        within = COUNTS_WITHIN(counts, 1536)
        return ROOM_INDEX(within.sum(1).reshape(-1, 1, 1), 1536, 8 * 1536)

    counts = torch.ones(8, 4, dtype=torch.int64)
    nodes = make_fx(index, tracing_mode="fake")(counts).graph.nodes
    kernels = sum(amounts_of(node, NominalSizes({})).num_kernels for node in nodes)
    assert kernels == pytest.approx(ROOM_KERNELS, abs=0.5)


@given(counts=COUNTS, room=st.integers(1, 9))
def test_the_first_rows_of_a_rank_have_room(counts, room):
    """Counts within the room are those of the experts' rows among the first `room`."""
    experts = [[e for e, count in enumerate(own) for _ in range(count)] for own in counts]
    expected = [[own[:room].count(e) for e in range(3)] for own in experts]
    assert COUNTS_WITHIN(torch.tensor(counts), room).tolist() == expected


@given(counts=COUNTS, room=st.integers(1, 6), seed=st.integers(0, 99))
@settings(deadline=None)
def test_moves_read_no_padding_and_no_gradient_of_it(counts, room, seed):
    """NaN in rows without a slot, in padding, and in their gradients reaches nothing."""
    of_ranks = torch.tensor([sum(own) for own in counts])
    num_rows = max(1, int(of_ranks.sum()))
    slots, rows = ROOM_INDEX(of_ranks.reshape(-1, 1, 1), room, num_rows)
    generator = torch.Generator().manual_seed(seed)
    values, gradient = (torch.randn(size, 3, generator=generator) for size in (num_rows, len(rows)))
    values[slots < 0], gradient[rows < 0] = torch.nan, torch.nan
    x = values.clone().requires_grad_()
    buffer = MOVE_ROWS(x, rows, slots)
    buffer.backward(gradient)
    assert torch.equal(buffer[slots[slots >= 0]], values[slots >= 0])
    assert (buffer[rows < 0] == 0).all() and (x.grad[slots < 0] == 0).all()
    assert torch.equal(x.grad[slots >= 0], gradient[slots[slots >= 0]])
    back = MOVE_ROWS(buffer.detach(), slots, rows)
    assert torch.equal(back[slots >= 0], values[slots >= 0])
