"""The room for rows by price: told by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_compile.config import ROOM_AT_FIRST, ROOMS
from moe_compile.plan.choose_plan import WORTH
from moe_compile.plan.row_rooms import choose_room, price_rooms, total
from moe_compile.runtime.rerun import NEED_UNIT, Rerun, RoomTimes


def times(per_share, reads_us=1000.0):
    """Return times to which each share more of padding adds `per_share`."""
    return RoomTimes(us=tuple(reads_us + per_share * (f - 1) for f in ROOMS), reads_us=reads_us)


def test_a_price_is_the_time_and_the_share_of_steps_that_run_again():
    """Of 19 steps 4 need more than 1.5, and one more of 20 is taken to."""
    needed = [1.3] * 15 + [1.6] * 3 + [2.2]
    priced = {one.room: one for one in price_rooms(needed, times(100.0))}
    assert priced[1.5].num_short == 4
    assert priced[1.5].us == pytest.approx(1050.0 + 5 / 20 * 1000.0)
    assert priced[1.25].us == pytest.approx(1025.0 + 1000.0)
    assert priced[2.5].us == pytest.approx(1150.0 + 1 / 20 * 1000.0)


@pytest.mark.parametrize(
    ("per_share", "expected"),
    [(0.0, 4.0), (50.0, 2.5), (100.0, 1.75), (2000.0, 1.1)],
    ids=["at no price it stays", "cheap", "a step of twenty", "all steps again are cheaper"],
)
def test_dear_padding_has_some_steps_run_again(per_share, expected):
    needed = [1.3] * 15 + [1.6] * 3 + [2.2]
    assert choose_room(needed, times(per_share), 4.0)[0].room == expected


def test_a_room_that_saves_little_is_not_changed_to():
    needed = [1.3] * 16
    little = times(0.9 * WORTH * 1000.0 / 0.5)  # 1.5 in place of 2.0 saves a half of this
    assert choose_room(needed, little, 2.0)[0].room == 2.0
    assert choose_room(needed, times(100.0), 2.0)[0].room == 1.5


@given(
    needed=st.lists(st.floats(1.0, 9.0), min_size=1, max_size=40),
    per_share=st.floats(0.0, 3000.0),
    now=st.sampled_from(ROOMS),
)
def test_no_room_has_a_price_far_below_the_chosen_one(needed, per_share, now):
    chosen, here = choose_room(needed, times(per_share), now)
    least = min(one.us for one in price_rooms(needed, times(per_share)))
    assert here.room == now and chosen.us <= here.us
    assert chosen.us * (1.0 - WORTH) <= least


def test_a_sum_of_times_is_not_known_where_one_is_not():
    one = times(100.0)
    assert total([one, one]) == RoomTimes(us=tuple(2 * us for us in one.us), reads_us=2000.0)
    assert total([one, None]) is total([]) is None


def test_runs_of_all_programs_count_and_notes_are_the_largest():
    switch = Rerun()
    assert switch.room == ROOM_AT_FIRST and switch.agreed_times(torch.device("cpu")) is None
    for note in ([0, 1250], [1, 1100]):
        switch.add(torch.tensor(note, dtype=torch.int32))
    assert switch.agreed(torch.device("cpu")) and switch.needed == 1250 / NEED_UNIT
    assert not switch.agreed(torch.device("cpu")) and switch.needed == 0
    for one in (times(100.0), times(0.0), times(0.0)):
        switch.ran(one)
    found = switch.agreed_times(torch.device("cpu"))
    assert found.reads_us == 3000.0 and found.us[0] == pytest.approx(3010.0)
    for one in (times(100.0), None):
        switch.ran(one)
    assert switch.agreed_times(torch.device("cpu")) is None
