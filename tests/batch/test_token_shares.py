"""Ranks that share out the tokens of their sequences: what is proven of it, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_reduce

from moe_compile.batch.batch_proof import find_batch_split
from moe_compile.graph.facts import GraphFacts
from moe_compile.journal.reasons import Left
from moe_compile.testing.mirrored_rank import become_mirrored
from tests.batch_layers import POSITIONS, WIDTH
from tests.capture import dynamo_graphs
from tests.dispatch_layers import SharedInOrderWeighted
from tests.sharded_blocks import GatheredSequence
from tests.slow_parameters import slow_but


class OnceMoreInStep(GatheredSequence):
    """Casts and adds to the sums before they are added up over the ranks: still a sum."""

    def added_up(self, rows):
        return super().added_up((rows.float() + 1.0).to(rows.dtype))


class Squared(GatheredSequence):
    def added_up(self, rows):
        return super().added_up(rows * rows)


class Largest(GatheredSequence):
    def added_up(self, rows):
        return self.half(all_reduce(rows, "max", dist.group.WORLD))

    def half(self, rows):
        return rows.chunk(2, 1)[0]


class NotAddedUp(GatheredSequence):
    def added_up(self, rows):
        return rows.chunk(2, 1)[0]


class OwnTokens(GatheredSequence):
    """Each rank routes half of its own sequences: nobody has the others' rows."""

    def forward(self, x):
        rows = self.moe(x.flatten(0, 1)).view(x.shape)
        return x + all_reduce(rows, "sum", dist.group.WORLD)


class OneSequence(SharedInOrderWeighted):
    """Routes a part that is no share of two ranks: others would be left out."""

    def first(self, tokens):
        return 0

    def own(self, chosen):
        return chosen[: chosen.shape[0] // 4]


class Turned(SharedInOrderWeighted):
    """Takes the other rank's share."""

    def first(self, tokens):
        return tokens.shape[0] // 2


def split_of(program):
    x = torch.randn(4, POSITIONS, WIDTH).bfloat16()
    (gm,) = dynamo_graphs(program, x)
    return find_batch_split(GraphFacts(gm.graph), 2)


def made(model, layer=SharedInOrderWeighted):
    become_mirrored()
    return model(layer, torch.bfloat16)


@pytest.mark.parametrize("model", [GatheredSequence, OnceMoreInStep])
def test_a_part_has_this_rank_route_its_share_of_it(model):
    split = split_of(made(model))
    (one,) = split.regions
    assert (split.size, one.share.ranks, one.share.number) == (4, (0, 1), 0)
    assert split.sizes([[one.share.factor]], 1) == [POSITIONS]  # of twice as many


NOT_SHARED = [
    *((model, SharedInOrderWeighted) for model in (Squared, Largest, NotAddedUp, OwnTokens)),
    *((GatheredSequence, layer) for layer in (OneSequence, Turned)),
]


@pytest.mark.parametrize(
    ("model", "layer"),
    slow_but(NOT_SHARED[1:6:4], NOT_SHARED),
    ids=lambda kind: kind.__name__,
)
def test_tokens_that_are_not_shared_out_leave_the_graph_whole(model, layer):
    with pytest.raises(Left):
        split_of(made(model, layer))


def test_gathered_sequences_come_apart_in_whatever_order_ranks_follow():
    """Every rank's first sequences are one part: two dimensions of the result are of ranks."""

    class OfAllRanks(GatheredSequence):
        def forward(self, x):
            others = all_gather_tensor_autograd(x, 0, dist.group.WORLD).unflatten(0, (2, -1))
            return super().forward(x + others.amax(0))

    assert split_of(made(OfAllRanks)).size == 4


def test_what_is_taken_of_other_ranks_sequences_in_their_order_mixes_them():
    class FirstOfAll(GatheredSequence):
        def forward(self, x):
            others = all_gather_tensor_autograd(x, 0, dist.group.WORLD)
            return super().forward(x + others[0::2])

    with pytest.raises(Left):
        split_of(made(FirstOfAll))
