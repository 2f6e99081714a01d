"""Experts whose tokens the model gathers itself are named; other gathers and reductions are not."""

import logging

import pytest
import torch
import torch.distributed as dist

from moe_compile import backend
from moe_compile.graph.facts import GraphFacts
from moe_compile.journal.reasons import Kind, Reason
from moe_compile.journal.remedies import REMEDIES
from moe_compile.regions.detect_moe import find_moe_regions
from moe_compile.report.compilations import unmatched
from moe_compile.testing.equivalence import differing_tensors
from tests.capture import dynamo_graphs
from tests.gathering_layers import DECOYS, STYLES, AroundExchanges, Gathering

WIDTH, HIDDEN, LOCAL = 16, 24, 4


def names(layers):
    return [layer.__name__ for layer in layers]


def tokens():
    return torch.randn(32, WIDTH, requires_grad=True)


def found_in(style, group):
    """Return the regions and refusals of a layer's only graph."""
    (gm,) = dynamo_graphs(style(WIDTH, HIDDEN, LOCAL, group), tokens())
    return find_moe_regions(GraphFacts(gm.graph))


@pytest.mark.parametrize("style", STYLES, ids=names(STYLES))
def test_gathered_tokens_of_experts_are_named_with_what_to_do(fake_ranks, style):
    regions, refused = found_in(style, fake_ranks)
    (left,) = unmatched(refused)
    assert (regions, left.reason, left.is_dispatch) == ([], Reason.TOKENS_GATHERED, True)
    assert left.detail.startswith("a reduce-scatter returns their sums, at gathering_layers.py:")
    assert left.reason.kind is Kind.NOT_POSSIBLE  # `strict` lets it pass


@pytest.mark.parametrize("style", DECOYS, ids=names(DECOYS))
def test_other_gathers_and_reductions_are_not_spoken_of(fake_ranks, style):
    regions, refused = found_in(style, fake_ranks)
    assert {other.reason for other in refused} == {Reason.NO_ROWS}
    assert not unmatched(refused)
    assert len(regions) == (style is AroundExchanges)


def test_a_warning_names_the_line_and_the_remedy(fake_ranks, caplog):
    backend._warn_once.cache_clear()
    (gm,) = dynamo_graphs(Gathering(WIDTH, HIDDEN, LOCAL, fake_ranks), tokens())
    inputs = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    options = {"megamoe.codegen": "fx", "megamoe.chunks": 2, "megamoe.strict": True}
    with caplog.at_level(logging.WARNING, logger="moe_compile"):
        backend.megamoe(gm, inputs, options=options)
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "gathering_layers.py:" in warning
    assert Reason.TOKENS_GATHERED.value in warning
    assert REMEDIES[Reason.TOKENS_GATHERED] in warning


def run_case(rank, chunk_by):
    torch._dynamo.reset()
    own = torch.Generator().manual_seed(rank)
    x, gradient = (torch.randn(32, WIDTH, generator=own) for _ in range(2))
    return differing_tensors(
        lambda: Gathering(WIDTH, HIDDEN, LOCAL, dist.group.WORLD),
        [(x, gradient)],
        {"megamoe.chunks": 2, "megamoe.chunk_by": chunk_by},
    )


@pytest.mark.parametrize("chunk_by", ["experts", "tokens"])
def test_they_are_left_as_they_are(two_ranks, chunk_by):
    assert two_ranks.run(run_case, chunk_by) == [[], []]
