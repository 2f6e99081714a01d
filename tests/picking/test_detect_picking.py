"""Which gathers of tokens run in slices, which are refused and why, and what is left untouched."""

import pytest
import torch

from moe_compile.errors import RegionRefused
from moe_compile.journal.reasons import Reason
from moe_compile.strict import refuse_unmet
from passes.pipeline import DYNAMO, run_level
from tests import gathering_layers, picking_layers
from tests.capture import dynamo_graphs, state
from tests.picking_layers import STYLES, Grouped, RoutedTogether, Searched, TokensWritten
from tests.slow_parameters import one_per_reason, slow_but

WIDTH, HIDDEN, LOCAL, TOKENS = 16, 32, 2, 24
SLICES = {"chunks": 2, "chunk_by": "tokens"}
REFUSED = {
    "Centred": Reason.ROWS_MIXED,
    "Dropped": Reason.RANDOM,
    "WrittenInPlace": Reason.UNKNOWN_OPERATOR,
    "Kept": Reason.ESCAPES,
    "ReadBetween": Reason.GRADIENT_ORDER,
    "ReadAfter": Reason.GRADIENT_ORDER,
    "SumsRead": Reason.PICKED_OTHERWISE,
    "TwoLoops": Reason.GRADIENT_ORDER,
    "OntoTokens": Reason.PICKED_OTHERWISE,
    "WrittenMeanwhile": Reason.PICKED_OTHERWISE,
    "PutElsewhere": Reason.PICKED_OTHERWISE,
    "ReadSums": Reason.PICKED_OTHERWISE,
    "OthersWritten": Reason.PICKED_OTHERWISE,
    "NotOfRows": Reason.PICKED_OTHERWISE,
    "AddedMeanwhile": Reason.PICKED_OTHERWISE,
    "OneForAll": Reason.ROWS_OUT_OF_ORDER,
    "TypeOfRows": Reason.UNKNOWN_OPERATOR,
}
DECOYS = [d for d in gathering_layers.DECOYS if d is not gathering_layers.AroundExchanges]


def names(layers):
    return [layer.__name__ for layer in layers]


def graph_of(style, group, dtype=torch.float32):
    sizes = (LOCAL, 2) if issubclass(style, Searched) else (4,)
    x = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    (gm,) = dynamo_graphs(style(WIDTH, HIDDEN, *sizes, group).to(dtype), x)
    return gm.graph


def after_passes(graph, **options):
    """Return what the passes decided on `graph`, and whether they changed it."""
    before, planned = str(graph), state(**{**SLICES, **options})
    for result in run_level(DYNAMO, graph, planned):
        planned.journal.add("dynamo", result)
    graph.lint()
    return planned, str(graph) != before


@pytest.mark.parametrize(
    "style", slow_but([*STYLES[::3], Grouped], [*STYLES, Grouped]), ids=names([*STYLES, Grouped])
)
def test_rows_of_every_expert_are_followed(fake_ranks, style):
    dtype = torch.bfloat16 if style is Grouped else torch.float32
    planned, is_changed = after_passes(graph_of(style, fake_ranks, dtype))
    (one,) = planned.picking
    assert one.is_rewritten and is_changed
    assert {other.reason for other in planned.found.others} <= {Reason.NOT_ALL_TO_ALL}
    assert one.found.region.num_local_experts == (1 if style is Grouped else LOCAL)
    assert one.found.region.is_alone == (style is not RoutedTogether)
    assert planned.plan.picking == (one.plan,)
    assert planned.gathered_groups == {one.plan.group}


def test_tokens_that_are_written_are_gathered_before_that(fake_ranks):
    """Elsewhere all slices but the first are gathered behind the routing."""
    for style, waits in ((Searched, True), (TokensWritten, False)):
        planned, _ = after_passes(graph_of(style, fake_ranks))
        region = planned.picking[0].found.region
        assert (region.behind_routing is not region.gather) == waits, style


@pytest.mark.parametrize("name", one_per_reason(REFUSED))
def test_what_is_not_proven_is_left_with_a_reason(fake_ranks, name):
    planned, is_changed = after_passes(graph_of(getattr(picking_layers, name), fake_ranks))
    assert (planned.picking, is_changed) == ((), False)
    (other,) = (o for o in planned.found.others if o.reason is not Reason.NOT_ALL_TO_ALL)
    assert other.reason is REFUSED[name], str(other)


def test_strict_raises_for_experts_that_are_not_proven(fake_ranks):
    planned, _ = after_passes(graph_of(picking_layers.Centred, fake_ranks))
    with pytest.raises(RegionRefused, match=Reason.ROWS_MIXED.value):
        refuse_unmet(planned.journal, "here")


@pytest.mark.parametrize("style", gathering_layers.STYLES, ids=names(gathering_layers.STYLES))
def test_as_many_rows_whatever_values_say_are_left_alone(fake_ranks, style):
    planned, is_changed = after_passes(graph_of(style, fake_ranks))
    assert (planned.picking, is_changed) == ((), False)
    assert Reason.PICKED_OTHERWISE in {other.reason for other in planned.found.others}


@pytest.mark.parametrize("style", DECOYS, ids=names(DECOYS))
def test_sequence_parallel_layers_and_gathered_parameters_are_untouched(fake_ranks, style):
    planned, is_changed = after_passes(graph_of(style, fake_ranks))
    assert (planned.picking, is_changed) == ((), False)
    assert {other.reason for other in planned.found.others} == {Reason.NOT_ALL_TO_ALL}


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"chunk_by": "auto"}, Reason.TOKENS_GATHERED),
        ({"chunk_by": "experts"}, Reason.TOKENS_GATHERED),
        ({"chunks": 1}, Reason.TOKENS_GATHERED),
        ({"chunks": 5}, Reason.UNEVEN_SLICES),
    ],
)
def test_without_slices_asked_for_that_divide_the_tokens_it_stays_whole(fake_ranks, options, left):
    planned, is_changed = after_passes(graph_of(Searched, fake_ranks), **options)
    assert not is_changed
    assert left in {verdict.reason for verdict in planned.journal.verdicts()}


def test_auto_makes_two_slices(fake_ranks):
    planned, _ = after_passes(graph_of(Searched, fake_ranks), chunks="auto")
    assert [one.plan.num_chunks for one in planned.picking] == [2]


def test_a_number_of_tokens_that_changes_is_left_whole(fake_ranks):
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    (gm,) = dynamo_graphs(Searched(WIDTH, HIDDEN, LOCAL, 2, fake_ranks), x)
    planned, is_changed = after_passes(gm.graph)
    assert (planned.picking, is_changed) == ((), False)
