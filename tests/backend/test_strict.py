"""`strict` raises where a matched region stays as it is, never for what is no region."""

import pytest
import torch
from torch.distributed._functional_collectives import all_to_all_single_autograd

from moe_compile.backend import megamoe
from moe_compile.errors import RegionRefused
from tests.attention_layers import (
    BatchExchange,
    HeadMask,
    HeadMixing,
    LateNorm,
    SplitAttention,
)
from tests.attention_refusals import LearnedMask
from tests.capture import dynamo_graphs
from tests.layers import Centred
from tests.slow_parameters import slow_but

STRICT = {"megamoe.strict": True, "megamoe.codegen": "fx", "megamoe.chunks": 2}


def graph(program):
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(program, x)
    return gm, [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]


def test_a_region_that_cannot_be_proven_raises_and_says_why(fake_ranks):
    gm, inputs = graph(Centred(16, 24, 8, 2, fake_ranks))
    with pytest.raises(RegionRefused, match=r"an operator of the experts mixes rows, .*mean"):
        megamoe(gm, inputs, options=STRICT)


def test_with_one_chunk_asked_for_nothing_is_left_undone(fake_ranks):
    gm, inputs = graph(Centred(16, 24, 8, 2, fake_ranks))
    assert callable(megamoe(gm, inputs, options={**STRICT, "megamoe.chunks": 1}))


def test_exchanges_that_are_no_region_do_not_raise(fake_ranks):
    def heads(x):
        return all_to_all_single_autograd(x, [16, 16], [16, 16], fake_ranks) * 2

    gm, inputs = graph(heads)
    assert callable(megamoe(gm, inputs, options=STRICT))


SPLIT = {"megamoe.strict": True, "megamoe.codegen": "fx", "megamoe.attention_chunks": 2}


def attention_graph(style, group, kv_heads=4):
    layer = style(16, 8, kv_heads, 8, group)
    (gm,) = dynamo_graphs(layer, torch.randn(4, 6, 16, requires_grad=True))
    return gm, [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]


def test_attention_between_exchanges_that_cannot_be_proven_raises(fake_ranks):
    gm, inputs = attention_graph(HeadMask, fake_ranks)
    why = r"attention_layers.py:\d+ in attend: .*attention_chunks was requested .*: its mask varies"
    with pytest.raises(RegionRefused, match=why):
        megamoe(gm, inputs, options=SPLIT)
    gm, inputs = attention_graph(HeadMask, fake_ranks)
    assert callable(megamoe(gm, inputs, options={**SPLIT, "megamoe.attention_chunks": 1}))


def test_a_mask_that_all_heads_share_and_that_is_learned_raises(fake_ranks):
    gm, inputs = attention_graph(LearnedMask, fake_ranks)
    with pytest.raises(RegionRefused, match="the gradient of a tensor that heads share"):
        megamoe(gm, inputs, options=SPLIT)


@pytest.mark.parametrize("style", slow_but([BatchExchange], [BatchExchange, HeadMixing, LateNorm]))
def test_attention_that_is_no_region_does_not_raise(fake_ranks, style):
    gm, inputs = attention_graph(style, fake_ranks)
    assert callable(megamoe(gm, inputs, options=SPLIT))


@pytest.mark.parametrize(("kv_heads", "groups"), slow_but([(4, 3)], [(2, 2), (4, 3)]))
def test_kv_heads_that_cannot_be_divided_do_not_raise(fake_ranks, kv_heads, groups):
    gm, inputs = attention_graph(SplitAttention, fake_ranks, kv_heads)
    assert callable(megamoe(gm, inputs, options={**SPLIT, "megamoe.attention_chunks": groups}))
