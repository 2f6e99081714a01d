"""The link takes the time it states, hides what it should, and moves the right bytes."""

from functools import partial

import pytest

from benchmarks.link.link_model import ExchangeEnds, LinkRate, Topology, Traffic
from benchmarks.link.post_board import SLOTS, Post, PostBoard, create_board
from tests.benchmarks import link_scenarios as scenarios

ALPHA, BANDWIDTH = 0.5, 100.0
"""One exchange of 25 rows of 4 bytes to the other rank: 100 bytes, 1 s, 0.5 s of latency."""


@pytest.fixture(scope="module")
def ranks(two_ranks, tmp_path_factory):
    path = tmp_path_factory.mktemp("board") / "posts"
    create_board(path, 2)
    two_ranks.run(scenarios.open_link, str(path))
    return two_ranks


def play(ranks, scenario, alpha=ALPHA, bandwidth=BANDWIDTH):
    return ranks.run(scenarios.run, scenario, alpha, bandwidth)


def times(results):
    return [time for _, time, _, _ in results]


IN_TURN = {
    "one takes latency plus bytes over bandwidth": (("exchange", 0), [1.5]),
    "two follow one another": (("exchange", "exchange", 0, 1), [1.5, 3.0]),
    "waiting in another order changes nothing": (("exchange", "exchange", 1, 0), [3.0, 3.0]),
    "of other kinds too": (("gather", "exchange", 1, 0), [3.0, 3.0]),
    "compute between launch and wait is hidden": (("exchange", (0.75, 0.75), 0), [1.5]),
    "longer compute hides it all": (("exchange", (5.0, 5.0), 0), [5.0]),
    "one starts when the last rank posts": (((0.0, 3.0), "exchange", 0), [4.5]),
}
"""Steps of both ranks -> when each wait ends."""


@pytest.mark.parametrize("name", IN_TURN)
def test_exchanges_end_when_the_link_has_carried_them(ranks, name):
    steps, ends = IN_TURN[name]
    results = play(ranks, partial(scenarios.in_turn, steps=steps))
    assert [found for found, *_ in results] == [ends] * 2
    assert times(results) == [ends[-1]] * 2
    assert results[0][2:] == (100 * len(ends), len(ends))


def test_uneven_rows_arrive_where_they_belong_what_a_rank_keeps_for_free(ranks):
    results = play(ranks, scenarios.uneven)
    assert times(results) == [4.5, 4.5]  # 400 bytes one way; 40 the other way beside them
    assert results[0][0] == [[0, i, 0, 0] for i in range(7)] + [[1, i, 1, 1] for i in range(10)]
    assert results[1][0] == [[0, 7 + i, 0, 0] for i in range(100)] + [
        [1, 10 + i, 1, 1] for i in range(50)
    ]


def test_gradients_cross_the_link_too(ranks):
    results = play(ranks, scenarios.gradient)
    assert results[0][0] == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    assert results[0][3] == 2


def test_of_a_gathered_tensor_what_others_have_crosses(ranks):
    results = play(ranks, scenarios.gather)
    assert times(results) == [2.5, 2.5]  # 400 bytes gathered, of which 200 are the other rank's
    assert results[0][2:] == (200, 1)
    own = [[4 * row + column for column in range(4)] for row in range(50)]
    assert results[0][0] == own + [[(value + 1) % 256 for value in row] for row in own]


def test_of_a_scattered_sum_what_others_get_crosses(ranks):
    results = play(ranks, scenarios.reduce)
    assert times(results) == [1.5, 1.5]  # 200 bytes summed, of which the other rank gets 100
    assert results[0][2:] == (100, 1)
    assert results[1][0] == [3.0 * value for value in range(25, 50)]


def test_the_busiest_of_several_ranks_decides(tmp_path):
    create_board(tmp_path / "posts", 3)
    boards = [PostBoard(tmp_path / "posts", rank, 3) for rank in range(3)]
    for board, wire_bytes in zip(boards, (100.0, 300.0, 200.0), strict=True):
        board.write(1, Post(1.0, wire_bytes))
    traffic, rate = Traffic(), LinkRate(latency_s=ALPHA, bytes_per_s=BANDWIDTH)
    ends = [ExchangeEnds(board, Topology(num_ranks=3), board.rank) for board in boards]
    assert [end.of(1, rate, traffic) for end in ends] == [4.5, 4.5, 4.5]
    assert traffic.wire_bytes == 900.0


def test_a_board_that_was_lapped_says_so(tmp_path):
    create_board(tmp_path / "posts", 1)
    board = PostBoard(tmp_path / "posts", 0, 1)
    for ordinal in (1, 1 + SLOTS):
        board.write(ordinal, Post(0.0, 0.0))
    assert board.read(1 + SLOTS) == [Post(0.0, 0.0)]
    with pytest.raises(RuntimeError, match="overwritten"):
        board.read(1)
