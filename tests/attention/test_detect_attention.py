"""Attention regions are found by what moves; what only looks like one is left with a reason."""

import inspect
import re

import pytest
import torch

from moe_compile.attention import detect_attention, head_proof
from moe_compile.attention.detect_attention import find_attention
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.legality import REASONS
from moe_compile.journal.reasons import Reason
from tests import attention_layers as layers
from tests import attention_variants as variants
from tests.attention_refusals import REFUSED
from tests.capture import dynamo_graphs
from tests.reason_programs import SECTIONS
from tests.slow_parameters import one_per_reason, slow_but


def find(style, group, heads=8, kv_heads=4, batch=4):
    layer = style(16, heads, kv_heads, 8, group)
    (gm,) = dynamo_graphs(layer, torch.randn(batch, 6, 16))
    regions, refused = find_attention(GraphFacts(gm.graph))
    return regions, [*refused.values()]


REGIONS = [
    (layers.SplitAttention, 3, 0, 2),
    (layers.RecipesAttention, 3, 0, 2),
    (layers.FusedAttention, 1, 0, 2),
    (layers.RepeatedKVAttention, 3, 0, 2),
    (layers.LateRepeatAttention, 3, 0, 2),
    (layers.NormedAttention, 3, 0, 2),
    (layers.LatentAttention, 1, 2, 4),
    (layers.SharedKeyAttention, 3, 0, 4),
    (variants.NamedArguments, 3, 0, 2),
    (variants.NamedExchange, 3, 0, 2),
    (variants.SlopesInFeatures, 3, 0, 4),
    (variants.SlopesBesideResult, 3, 0, 4),
    (variants.FixedMask, 3, 0, 2),
]


@pytest.mark.parametrize(
    ("style", "exchanges", "local", "kv_heads"),
    slow_but(REGIONS[::3], REGIONS),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_style_is_a_region(fake_ranks, style, exchanges, local, kv_heads):
    (region,), refused = find(style, fake_ranks)
    assert not refused
    assert len(region.exchanges) == exchanges
    pairs = zip(region.operands, region.sources, strict=True)
    assert len({operand for operand, source in pairs if source is None}) == local
    assert (region.num_ranks, region.num_heads, region.num_kv_heads) == (2, 4, kv_heads)


@pytest.mark.parametrize("style", one_per_reason(REFUSED), ids=lambda style: style.__name__)
def test_what_only_looks_like_a_region_is_left_with_a_reason(fake_ranks, style):
    regions, (refused,) = find(style, fake_ranks)
    assert not regions
    reason, begins = REFUSED[style]
    assert refused.reason is reason and refused.detail.startswith(begins)


@pytest.mark.parametrize("style", [layers.SplitAttention, layers.LateRepeatAttention])
def test_one_local_kv_head_has_no_factor_though_it_is_repeated(fake_ranks, style):
    (region,), _ = find(style, fake_ranks, kv_heads=2)
    assert region.head is None


def test_every_reason_has_a_program():
    """Those of the plan have theirs in tests/passes/test_chunk_attention.py."""
    files = (detect_attention, head_proof)
    said = re.findall(r"Reason\.([A-Z_]+)", "".join(map(inspect.getsource, files)))
    known = {*(Reason[name] for name in said), *REASONS.values()}
    assert known == {reason for reason, _ in REFUSED.values()}


def test_every_detail_of_attention_that_is_no_region_has_a_program():
    reason = Reason.NOT_BETWEEN_EXCHANGES
    details = SECTIONS[reason.name].details
    assert sorted(details) == sorted({said for why, said in REFUSED.values() if why is reason})
