"""Where a collective's bytes go, against messages counted one by one."""

import itertools

import pytest

from moe_compile.hardware.links import leaving_share, spread_of

GROUPS = [(16, 8), (64, 8), (6, 2), (4, 1)]


@pytest.mark.parametrize(("num_ranks", "node_ranks"), GROUPS)
def test_an_all_to_all_leaves_the_node_as_often_as_it_meets_another(num_ranks, node_ranks):
    """Rank 0 sends one message to each other rank."""
    others = range(1, num_ranks)
    within = sum(other // node_ranks == 0 for other in others)
    spread = spread_of(num_ranks, node_ranks, is_gather=False)
    assert spread.within == pytest.approx(within / len(others))
    assert spread.between == pytest.approx(1 - within / len(others))


@pytest.mark.parametrize(("num_ranks", "node_ranks"), GROUPS)
def test_a_gathered_block_enters_a_node_once_and_goes_round_in_it(num_ranks, node_ranks):
    """A block comes in by the adapter of the rank that stands where its owner does."""
    by_network = dict.fromkeys(range(num_ranks), 0)
    by_node_link = dict.fromkeys(range(num_ranks), 0)
    for owner, reader in itertools.product(range(num_ranks), repeat=2):
        if owner == reader:
            continue
        is_entry = owner % node_ranks == reader % node_ranks
        is_remote = owner // node_ranks != reader // node_ranks
        (by_network if is_entry and is_remote else by_node_link)[reader] += 1
    spread = spread_of(num_ranks, node_ranks, is_gather=True)
    for received, share in ((by_network, spread.between), (by_node_link, spread.within)):
        (count,) = set(received.values())
        assert share == pytest.approx(count / (num_ranks - 1))
    assert spread.within + spread.between == pytest.approx(1.0)


@pytest.mark.parametrize("is_gather", [False, True])
def test_a_group_within_a_node_needs_no_network_and_an_unknown_one_nothing_else(is_gather):
    assert spread_of(8, 8, is_gather=is_gather).between == 0.0
    assert spread_of(0, 8, is_gather=is_gather).within == 0.0


def test_a_ranks_own_part_does_not_leave_it():
    assert [leaving_share(n) for n in (0, 1, 2, 4)] == [1.0, 0.0, 0.5, 0.75]
