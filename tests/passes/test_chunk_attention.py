"""Groups of heads as the options say, and what the report says of them."""

import re

import pytest
import torch
from rich.console import Console

from moe_compile.backend import rewrite
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.query import is_launch
from moe_compile.journal.reasons import Reason
from moe_compile.plan.chunk_numbers import NumericalChange
from moe_compile.report.explain import print_report
from moe_compile.report.process_report import ProcessReport
from tests.attention_layers import (
    LatentAttention,
    NormedAttention,
    SplitAttention,
    TensorParallel,
)
from tests.attention_refusals import LocalKeys
from tests.attention_variants import ROUNDED_BY_GROUP, FlashOff, UnevenRows
from tests.capture import dynamo_graphs
from tests.slow_parameters import slow_but

ROUNDED = [LatentAttention, LocalKeys, NormedAttention, *ROUNDED_BY_GROUP]
FEW = Reason.FEW_KV_HEADS.value


def compiled(style, group, kv_heads=8, *, heads=24, batch=4, **options):
    """Return the rewritten graph of a layer with `kv_heads / 2` local KV heads, and its report."""
    x = torch.randn(batch, 6, 16, requires_grad=True)
    (gm,) = dynamo_graphs(style(16, heads, kv_heads, 8, group), x)
    _, compilation = rewrite(gm, MegaMoEConfig(hardware="cpu", **options))
    return gm, compilation


@pytest.mark.parametrize(
    ("asked", "kv_heads", "groups", "verdict"),
    [
        (1, 8, 1, f"{Reason.NOT_ASKED.value} (the options ask for one chunk)"),
        (4, 8, 4, "chunked"),
        (4, 4, 1, f"{FEW} (2 heads cannot be divided into 4 equal groups)"),
        (2, 2, 1, f"{FEW} (one local KV head)"),
        ("auto", 8, 2, "chunked"),
        ("auto", 6, 1, f"{FEW} (3 heads cannot be divided into 2 equal groups)"),
        ("auto", 2, 1, f"{FEW} (one local KV head)"),
    ],
)
def test_groups_are_what_the_option_and_the_heads_say(fake_ranks, asked, kv_heads, groups, verdict):
    gm, compilation = compiled(SplitAttention, fake_ranks, kv_heads, attention_chunks=asked)
    (found,) = compilation.attention
    assert (found.num_chunks, found.verdict) == (groups, verdict)
    assert sum(map(is_launch, gm.graph.nodes)) == 4 * groups


@pytest.mark.parametrize(
    ("asked", "groups", "verdict"),
    [(2, 2, "chunked"), ("auto", 1, Reason.MAY_ROUND.value)],
)
@pytest.mark.parametrize("equal_tokens", slow_but([True], [False, True]))
@pytest.mark.parametrize(
    "style",
    slow_but([NormedAttention, UnevenRows], [style for style in ROUNDED if style is not FlashOff]),
)
def test_where_groups_may_round_they_are_asked_for_by_number(
    fake_ranks, style, asked, groups, verdict, equal_tokens
):
    options = {"attention_chunks": asked, "equal_tokens": equal_tokens}
    _, compilation = compiled(style, fake_ranks, **options)
    (found,) = compilation.attention
    assert (found.num_chunks, found.verdict) == (groups, verdict)
    assert (NumericalChange.HEADS.value in found.remarks) == (groups > 1)


@pytest.mark.parametrize(("heads", "batch"), slow_but([(4, 1), (4, 2)], [(4, 1), (8, 1), (4, 2)]))
@pytest.mark.parametrize("asked", [2, "auto"])
@pytest.mark.parametrize("equal_tokens", slow_but([True], [False, True]))
def test_a_head_is_alone_in_a_batch_of_one_only_where_a_number_asks_for_it(
    fake_ranks, heads, batch, asked, equal_tokens
):
    options = {"attention_chunks": asked, "equal_tokens": equal_tokens, "heads": heads}
    _, compilation = compiled(SplitAttention, fake_ranks, 4, batch=batch, **options)
    (found,) = compilation.attention
    alone = (heads, batch) == (4, 1)
    assert (NumericalChange.HEADS.value in found.remarks) == (alone and asked == 2)
    if alone and asked == "auto":
        assert found.num_chunks == 1


def test_the_report_shows_what_became_of_every_attention(fake_ranks):
    report = ProcessReport()
    for style, options in (
        (SplitAttention, {"attention_chunks": 2}),
        (TensorParallel, {"attention_chunks": 2}),
    ):
        report.add(compiled(style, fake_ranks, **options)[1], "", "cpu")
    console = Console(record=True, width=200)
    print_report(report.as_dict(), console)
    text = " ".join(console.export_text().split())
    place = r"attention_layers\.py:\d+"
    assert re.search(place + " 2 12 4 2 chunked", text)
    left = f"{Reason.NOT_BETWEEN_EXCHANGES.value} \\(tensor parallelism shards its heads"
    assert re.search(f"{place} - - - - {left}", text)
