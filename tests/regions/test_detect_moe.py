"""Regions are found by data flow; what only looks like one is left alone with a reason."""

import pytest
import torch
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.utils.checkpoint import checkpoint

from moe_compile.graph.facts import GraphFacts
from moe_compile.journal.reasons import Reason
from moe_compile.regions.detect_moe import find_moe_regions
from moe_compile.testing.programs.choices import Counts, Tally
from moe_compile.testing.programs.grammar import Experts
from tests.capture import dynamo_graphs
from tests.layer_programs import layer_of
from tests.layers import STYLES, WAIT, GroupedExperts

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


FILLED = Experts(top_k=2, local=4, tally=Tally.SCATTER_ADD_IN_PLACE, counts=Counts.LEGACY)
SENT = """arrived = torch.empty_like(counts)
        dist.all_to_all_single(arrived, counts)
"""
READ_BEFORE = f"""counts.add_(1)
        early = counts.view(2, -1).sum(1)
        counts.sub_(1)
        {SENT}        sent = (early - 4).tolist()
"""


def test_counts_may_be_filled_in_place_before_they_are_sent(fake_ranks):
    """What fills them stays outside; the body reads views of what was filled."""
    (region,), refused = find(layer_of(FILLED, dtype="bfloat16"), rows())
    assert refused == []
    assert not [node for node in region.body if str(node.target).endswith("add_")]


def test_counts_that_are_read_before_they_are_filled_keep_the_region_whole(fake_ranks):
    """Split sizes are those of counts of which each is one too many when it is read."""
    sent = f"{SENT}        sent = counts.reshape(2, -1).sum(1).tolist()\n"
    layer = layer_of(FILLED, sent, READ_BEFORE, dtype="bfloat16")
    regions, refused = find(layer, rows())
    assert (regions, refused) == ([], [Reason.MUTATED_MEANWHILE])
