"""Code of FlexAttention in parts of the batch: what it may do with the number of a sequence."""

from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from moe_compile.batch.batch_proof import split_around
from moe_compile.graph.facts import GraphFacts
from tests.capture import dynamo_graphs
from tests.slow_parameters import slow_but

SEQUENCES, HEADS, POSITIONS, WIDTH = 4, 2, 128, 16


def causal(b, h, q, k):
    return q >= k


def documents(b, h, q, k, ids):
    return (q >= k) & (ids[b, q] == ids[b, k])


def rows(b, h, q, k, ids):
    return ids[b][q] == ids[b][k]


def first_apart(b, h, q, k, ids):
    return (q >= k) | (b == 0)


def the_next(b, h, q, k, ids):
    return ids[(b + 1) % SEQUENCES, q] == ids[b, k]


def of_the_first(b, h, q, k, ids):
    return ids[0, q] == ids[b, k]


def by_both(b, h, q, k, ids):
    return ids[b, b] == ids[b, k]


def of_head(b, h, q, k, ids):
    return ids[h, q] == ids[h, k]


def indices_apart(code, num_masks=SEQUENCES):
    """Return how many indices come apart, sequences or heads, of attention with this mask."""
    x = torch.randn(SEQUENCES, HEADS, POSITIONS, WIDTH)
    ids = torch.zeros(SEQUENCES, POSITIONS, dtype=torch.int64)
    given = (num_masks, None, POSITIONS, POSITIONS, "cpu")
    blocks = create_block_mask(code if code is causal else partial(code, ids=ids), *given)
    gm, *_ = dynamo_graphs(lambda x, blocks: flex_attention(x, x, x, block_mask=blocks), x, blocks)
    return split_around(GraphFacts(gm.graph), [], 2).size


@pytest.mark.parametrize("num_masks", slow_but([SEQUENCES], [1, SEQUENCES]))
@pytest.mark.parametrize("code", [causal, documents, rows, of_head], ids=lambda code: code.__name__)
def test_sequences_come_apart_where_each_looks_up_its_own(code, num_masks):
    assert indices_apart(code, num_masks) == SEQUENCES


@pytest.mark.parametrize(
    "code", [first_apart, the_next, of_the_first, by_both], ids=lambda code: code.__name__
)
def test_code_that_tells_sequences_by_their_number_keeps_them_together(code):
    """Heads come apart all the same."""
    assert indices_apart(code) == HEADS
