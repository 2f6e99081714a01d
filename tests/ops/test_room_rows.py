"""Rows in buffers with room: indices and moves equal loops over rows, forward and backward."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compile.ops.room_rows import COUNTS_WITHIN, MOVE_ROWS, ROOM_INDEX

COUNTS = st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4)


def slots_by_hand(counts, room, num_rows):
    """Return the slot of each row, and the row of each slot."""
    slots, rows, first = [-1] * num_rows, [-1] * (len(counts) * room), 0
    for rank, count in enumerate(counts):
        for within in range(min(count, room)):
            slots[first + within] = rank * room + within
            rows[rank * room + within] = first + within
        first += count
    return slots, rows


@given(counts=COUNTS, room=st.integers(1, 6), behind=st.integers(0, 3))
def test_rows_have_the_slots_that_there_are(counts, room, behind):
    of_ranks = [sum(own) for own in counts]
    num_rows = max(1, sum(of_ranks) + behind)
    found = ROOM_INDEX(torch.tensor(of_ranks), room, num_rows)
    expected = slots_by_hand(of_ranks, room, num_rows)
    assert [tensor.tolist() for tensor in found] == list(expected)


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
    slots, rows = ROOM_INDEX(of_ranks, room, num_rows)
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
