"""Regions are found by data flow; what only looks like one is left alone with a reason."""

import pytest
import torch
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.utils.checkpoint import checkpoint

from moe_compile.graph.facts import GraphFacts
from moe_compile.journal.reasons import Reason
from moe_compile.regions.detect_moe import find_moe_regions
from tests.capture import dynamo_graphs
from tests.layers import STYLES, WAIT, GroupedExperts
from tests.legacy_layers import DeepSpeed

WIDTH, HIDDEN, EXPERTS, TOP_K = 16, 24, 8, 2


def rows(count=32, width=WIDTH):
    return torch.randn(count, width, dtype=torch.bfloat16, requires_grad=True)


def find(program, *inputs):
    """Return (regions, refusal reasons) over all graphs of `program`."""
    regions, refused = [], []
    for gm in dynamo_graphs(program, *inputs):
        found, left = find_moe_regions(GraphFacts(gm.graph))
        regions += found
        refused += [r.reason for r in left]
    return regions, refused


@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.__name__)
def test_every_style_of_layer_is_one_region(fake_ranks, style):
    (region,), refused = find(style(WIDTH, HIDDEN, EXPERTS, TOP_K, fake_ranks), rows())
    assert (region.num_ranks, region.num_local_experts, refused) == (2, 4, [])


def test_two_layers_are_two_regions_each_with_its_own_counts(fake_ranks):
    first, second = (GroupedExperts(WIDTH, HIDDEN, EXPERTS, TOP_K, fake_ranks) for _ in range(2))
    regions, refused = find(lambda x: second(first(x)), rows())
    assert [r.name for r in regions] == ["region 0", "region 1"]
    assert len({r.count_exchange for r in regions}) == 2
    assert refused == []


def test_a_region_inside_a_checkpointed_function_is_found(fake_ranks):
    layer = GroupedExperts(WIDTH, HIDDEN, EXPERTS, TOP_K, fake_ranks)
    regions, _ = find(lambda x: checkpoint(layer, x, use_reentrant=False), rows())
    assert len(regions) == 1


def test_a_region_below_attentions_exchanges_takes_the_nearest_counts(fake_ranks):
    layer = GroupedExperts(WIDTH, HIDDEN, EXPERTS, TOP_K, fake_ranks)

    def program(x):
        heads = all_to_all_single_autograd(x, [16, 16], [16, 16], fake_ranks)
        back = all_to_all_single_autograd(heads * 2, [16, 16], [16, 16], fake_ranks)
        return layer(x + back)

    (region,), refused = find(program, rows())
    assert refused == [Reason.EVEN_SPLITS] * 2  # sequence-to-head exchange: a decoy
    assert region.count_exchange.name not in {"tensor", "tensor_1"}


def test_an_exchange_of_embeddings_is_left_alone(fake_ranks):
    """Ids go out, vectors come back with the splits swapped: no rows are dispatched."""
    table = torch.randn(64, WIDTH)

    def program(ids, counts):
        received = WAIT(all_to_all_single(counts, None, None, fake_ranks))
        sent, got = counts.tolist(), received.tolist()
        asked = WAIT(all_to_all_single(ids, got, sent, fake_ranks))
        return WAIT(all_to_all_single(table[asked], sent, got, fake_ranks))

    ids = torch.arange(32)
    regions, refused = find(program, ids, torch.tensor([16, 16]))
    assert regions == []
    assert refused == [Reason.NO_ROWS] * 2 + [Reason.NO_COMBINE]


def test_a_dispatch_whose_rows_never_come_back_is_left_alone(fake_ranks):
    def program(x, counts):
        received = WAIT(all_to_all_single(counts, None, None, fake_ranks))
        return all_to_all_single_autograd(x, received.tolist(), counts.tolist(), fake_ranks) * 2

    regions, refused = find(program, rows(), torch.tensor([16, 16]))
    assert (regions, refused[-1]) == ([], Reason.NO_COMBINE)


def test_sizes_that_no_exchange_of_integers_gave_are_left_alone(fake_ranks):
    def program(x, sizes):
        there = all_to_all_single_autograd(x, sizes.tolist(), sizes.tolist(), fake_ranks)
        return all_to_all_single_autograd(there * 2, sizes.tolist(), sizes.tolist(), fake_ranks)

    regions, refused = find(program, rows(), torch.tensor([16, 16]))
    assert regions == []
    assert Reason.NO_COUNT_EXCHANGE in refused or Reason.NO_COMBINE in refused


def test_counts_may_be_filled_in_place_before_they_are_sent(fake_ranks):
    """What fills them stays outside; the body reads views of what was filled."""
    (region,), refused = find(DeepSpeed(WIDTH, HIDDEN, EXPERTS, TOP_K, fake_ranks), rows())
    assert refused == []
    assert not [node for node in region.body if str(node.target).endswith("add_")]


class ReadBetweenFills(DeepSpeed):
    """Split sizes are those of counts of which each is one too many when it is read."""

    def tally(self, flat):
        counts = super().tally(flat)
        counts.add_(1)
        self._early = counts.view(self.num_ranks, -1).sum(1)
        counts.sub_(1)
        return counts

    def splits(self, counts, received):
        early, self._early = self._early, None
        return (early - self.local).tolist(), super().splits(counts, received)[1]


def test_counts_that_are_read_before_they_are_filled_keep_the_region_whole(fake_ranks):
    layer = ReadBetweenFills(WIDTH, HIDDEN, EXPERTS, TOP_K, fake_ranks)
    regions, refused = find(layer, rows())
    assert (regions, refused) == ([], [Reason.MUTATED_MEANWHILE])


class CountsRowsOnTheWay(GroupedExperts):
    """The experts write a buffer of the module between dispatch and combine."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("load", torch.zeros(self.local))

    def experts(self, rows, received):
        self.load.add_(received.view(self.num_ranks, -1).sum(0))
        return super().experts(rows * (1 + 0 * self.load.sum()).to(rows.dtype), received)


def test_experts_that_write_outside_are_refused(fake_ranks):
    layer = CountsRowsOnTheWay(WIDTH, HIDDEN, EXPERTS, TOP_K, fake_ranks)
    regions, refused = find(layer, rows())
    assert (regions, refused) == ([], [Reason.MUTATES_OUTSIDE])


class ThirdExchange(GroupedExperts):
    """The experts exchange rows once more between dispatch and combine."""

    def experts(self, rows, received):
        out = super().experts(rows, received)
        total = all_gather_tensor(out.sum(0, keepdim=True), 0, self.group)
        return out + WAIT(total).sum(0, keepdim=True)


def test_experts_that_communicate_are_refused(fake_ranks):
    layer = ThirdExchange(WIDTH, HIDDEN, EXPERTS, TOP_K, fake_ranks)
    regions, refused = find(layer, rows())
    assert (regions, refused) == ([], [Reason.COMMUNICATES, Reason.NO_ROWS])
