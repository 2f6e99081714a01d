"""Links inside nodes and between them: the bytes on each, and when exchanges over them end."""

import pytest

from benchmarks.link.link_model import Crossing, ExchangeEnds, LinkRate, Span, Topology, Traffic
from benchmarks.link.post_board import Post, PostBoard, create_board
from tests.benchmarks import level_scenarios as scenarios

RATE = LinkRate(latency_s=1.0, bytes_per_s=10.0, inside_latency_s=0.5, inside_bytes_per_s=100.0)
TWO_BY_TWO = Topology(num_ranks=4, num_local=2)


class Ranks:
    """Four ranks of one process that post by hand."""

    def __init__(self, folder, topology=TWO_BY_TWO):
        create_board(folder / "posts", 4)
        boards = [PostBoard(folder / "posts", rank, 4) for rank in range(4)]
        self.ends = [ExchangeEnds(board, topology, board.rank) for board in boards]
        self.traffic = [Traffic() for _ in boards]
        self.ordinal = 0

    def post(self, span, between=(0.0,) * 4, inside=(0.0,) * 4, at=(0.0,) * 4):
        self.ordinal += 1
        for end, *one in zip(self.ends, at, between, inside, strict=True):
            end.board.write(self.ordinal, Post(*one, span))
        return self.ordinal

    def ends_of(self, ordinal):
        pairs = zip(self.ends, self.traffic, strict=True)
        return [end.of(ordinal, RATE, traffic) for end, traffic in pairs]


@pytest.fixture
def ranks(tmp_path):
    return Ranks(tmp_path)


def test_a_flat_exchange_takes_both_levels_at_once(ranks):
    """20 bytes to another node take 1 + 2 s, beside 0.5 + 1 s inside; then 0.5 + 4 s beside 1 s."""
    first = ranks.post(Span.ALL, between=(20, 0, 10, 5), inside=(0, 100, 10, 0))
    second = ranks.post(Span.ALL, inside=(0, 0, 0, 400))
    assert ranks.ends_of(first) == [3.0] * 4
    assert ranks.ends_of(second) == [7.5] * 4  # in its group exchanges follow one another
    assert ranks.traffic[0].crossings == [Crossing(20, 100), Crossing(0, 400)]
    assert ranks.traffic[0].alone_s(RATE) == 7.5


def test_nodes_and_places_exchange_by_themselves(ranks):
    inside = ranks.post(Span.NODE, inside=(100, 0, 0, 300))
    across = ranks.post(Span.CROSS, between=(30, 0, 0, 10))
    assert ranks.ends_of(inside) == [1.5, 1.5, 3.5, 3.5]
    assert ranks.ends_of(across) == [4.0, 2.0, 4.0, 2.0]  # beside it, on the other link
    assert [t.crossings for t in ranks.traffic] == [
        [Crossing(inside=sent), Crossing(between=crossed)]
        for sent, crossed in ((100, 30), (100, 10), (300, 30), (300, 10))
    ]
    assert (ranks.traffic[2].wire_bytes, ranks.traffic[2].inside_bytes) == (30, 300)


def test_exchanges_of_two_groups_share_a_port_in_turn(ranks):
    """The flat exchange waits for ports of all ranks: the slower pair of places holds it up."""
    across = ranks.post(Span.CROSS, between=(30, 0, 0, 10))
    flat = ranks.post(Span.ALL, between=(10,) * 4, inside=(100,) * 4)
    inside = ranks.post(Span.NODE, inside=(50,) * 4)
    assert ranks.ends_of(across) == [4.0, 2.0, 4.0, 2.0]
    assert ranks.ends_of(flat) == [6.0] * 4
    assert ranks.ends_of(inside) == [2.5] * 4  # the flat one's part inside took until 1.5


def test_a_shared_adapter_carries_what_all_ranks_of_a_node_send(tmp_path):
    ranks = Ranks(tmp_path, Topology(num_ranks=4, num_local=2, shares_adapter=True))
    across = ranks.post(Span.CROSS, between=(30, 20, 0, 10), at=(0.0, 2.0, 0.0, 0.0))
    flat = ranks.post(Span.ALL, between=(5, 10, 10, 10))
    assert ranks.ends_of(across) == [8.0] * 4  # both pairs of places, from the last post on
    assert ranks.ends_of(flat) == [11.0] * 4
    assert ranks.traffic[1].wire_bytes == 70


def test_ranks_that_launch_other_kinds_are_told(ranks):
    ranks.post(Span.NODE)
    ranks.ends[3].board.write(1, Post(0.0, 0.0, 0.0, Span.CROSS))
    with pytest.raises(RuntimeError, match="other kinds"):
        ranks.ends_of(1)


@pytest.fixture(scope="module")
def two_nodes(four_ranks, tmp_path_factory):
    path = tmp_path_factory.mktemp("board") / "posts"
    create_board(path, 4)
    four_ranks.run(scenarios.open_links, str(path))
    return four_ranks


def test_bytes_of_real_exchanges_are_counted_by_level_and_arrive(two_nodes):
    """Rank r sends 10 r + s rows of 4 bytes to rank s of four."""
    for rank, (found, arrived) in enumerate(two_nodes.run(scenarios.uneven)):
        assert all(arrived)
        flat, node, cross = found
        # from and to node 0: ranks 2 and 3 send it 4 (20 + 21), (30 + 31) bytes, more than they get
        assert flat == Crossing(between=4 * 61, inside=4 * 32)
        assert node == Crossing(inside=4 * (10, 10, 32, 32)[rank])
        assert cross == Crossing(between=4 * (20, 31, 20, 31)[rank])


def test_a_gather_over_nodes_enters_each_once(two_nodes):
    """100 bytes of each rank: of 200 that enter a node each adapter takes 100; 200 go on inside."""
    for crossing in two_nodes.run(scenarios.gather):
        assert crossing == Crossing(between=100.0, inside=200.0)
