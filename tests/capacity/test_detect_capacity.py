"""Experts with a capacity are told from everything else that even exchanges carry."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from moe_compile.journal.reasons import Kind, Reason
from moe_compile.report.compilations import unmatched
from moe_compile.testing.programs.choices import Across, Extra, Mixing
from moe_compile.testing.programs.grammar import Capacity, Program
from moe_compile.testing.programs.run import load
from moe_compile.testing.programs.text import source_of
from passes.detect_regions import DetectRegions
from tests.attention_layers import LateNorm, SplitAttention
from tests.capture import dynamo_graphs, state
from tests.layer_programs import layer_of
from tests.layers import ALL_TO_ALL, WAIT
from tests.slow_parameters import one_per_reason

WIDTH, LOCAL = 16, 4
LOOP = Capacity(local=LOCAL, top_k=2, across=Across.CHUNKED)
EINSUM = Capacity(local=LOCAL, top_k=2)


class Decoy(nn.Module):
    """Even exchanges that bring no rows to experts."""

    def __init__(self, width, group):
        super().__init__()
        self.group, self.num_ranks = group, dist.get_world_size(group)
        self.weight = nn.Parameter(torch.randn(width, width))
        self.table = nn.Parameter(torch.randn(8, width))

    def exchange(self, x):
        return all_to_all_single_autograd(x.contiguous(), None, None, self.group)


class PipelineShuffle(Decoy):
    """Micro-batches travel on, through a layer, and back."""

    def forward(self, x):
        return self.exchange(torch.relu(self.exchange(x) @ self.weight))


class SequenceShuffle(Decoy):
    """Positions for features and back, a norm between."""

    def forward(self, x):
        there = self.exchange(x.view(self.num_ranks, -1, x.shape[-1]))
        normed = F.layer_norm(there, there.shape[-1:])
        return self.exchange(normed).view(x.shape)


class ShardedTable(Decoy):
    """Rows of a table that is sharded over ranks: indices there, rows back."""

    def forward(self, x):
        index = torch.arange(x.shape[0], device=x.device) % self.table.shape[0]
        wanted = WAIT(
            ALL_TO_ALL(index, self._halves(index), self._halves(index), self.group.group_name)
        )
        return x + self.exchange(F.embedding(wanted, self.table))

    def _halves(self, index):
        return [index.shape[0] // self.num_ranks] * self.num_ranks


class ScaledHeads(Decoy):
    """Each head has a scale of its own, between exchanges of heads: no weights of a product."""

    def forward(self, x):
        heads = self.exchange(x.view(self.num_ranks, 4, -1)).view(self.num_ranks, 4, -1)
        scaled = heads * self.weight[:4, :1]
        return self.exchange(scaled).view(x.shape)


class OneWay(Decoy):
    """Batched products with weights by index, and no exchange back."""

    def forward(self, x):
        rows = self.exchange(x.view(self.num_ranks, 4, -1)).view(self.num_ranks, 4, -1)
        rows = rows.view(4, -1, x.shape[-1])
        return torch.bmm(rows, self.weight.expand(4, -1, -1))


DECOYS = (PipelineShuffle, SequenceShuffle, ShardedTable, ScaledHeads, OneWay)


def detected(program, *inputs):
    (gm,) = dynamo_graphs(program, *inputs)
    found = state(chunks=2)
    report = DetectRegions().run(gm.graph, found)
    return found.found, report


def rows(count=32, width=WIDTH):
    return torch.randn(count, width, requires_grad=True)


@pytest.mark.parametrize("across", Across)
@pytest.mark.parametrize("extra", [Extra.LOSS, Extra.BIAS])
def test_every_style_is_one_region_with_its_exchanges(fake_ranks, across, extra):
    layer = Capacity(local=LOCAL, top_k=2, across=across, extras=frozenset({extra}))
    found, report = detected(layer_of(layer), rows())
    (one,) = found.by_kind["capacity"]
    assert (one.region.num_ranks, one.region.num_local_experts) == (2, LOCAL)
    assert found.others == () and found.experts == ()
    assert report.applied == ("region 0",)
    marks = {str(launch.meta["custom"]) for launch in one.region.launches}
    assert len(marks) == 1, "both exchanges are of one region"


def test_two_layers_are_two_regions(fake_ranks):
    text = source_of(Program(layers=(LOOP, EINSUM), dtype="float32"))
    found, _ = detected(load(text).Program(), rows())
    assert [one.region.name for one in found.by_kind["capacity"]] == ["region 0", "region 1"]


REFUSED = {
    Mixing.SHARED_BIAS: Reason.SHARED_PARAMETER,
    Mixing.MEAN: Reason.ROWS_MIXED,
    Mixing.NORM: Reason.ROWS_MIXED,
    Mixing.NEXT: Reason.EXPERTS_LOST,
    Mixing.IN_PLACE: Reason.EXPERTS_LOST,
    Mixing.DROPOUT: Reason.EXPERTS_LOST,
    Mixing.RECEIVED: Reason.ESCAPES,
    Mixing.FLIPPED: Reason.EXPERTS_LOST,
    "detached": Reason.NO_GRADIENT,
    "reduced": Reason.COMMUNICATES,
    "tied": Reason.SHARED_PARAMETER,
}
"""What mixes experts, by the grammar or by a change -> the reason."""
CHANGES = {
    "detached": ("self.expert(part, e)", "self.expert(part if e else part.detach(), e)"),
    "reduced": ("return out", 'return all_reduce(out, "sum", self.group)'),
    "tied": ("self.w1[e].t()", "self.w1[e - (e == 1)]"),
}
"""Of a layer's source."""


@pytest.mark.parametrize("choice", one_per_reason(REFUSED), ids=str)
def test_what_is_meant_and_not_proven_is_refused_with_its_reason(fake_ranks, choice):
    if isinstance(choice, Mixing):
        layer = layer_of(dataclasses.replace(LOOP, mixing=frozenset({choice})))
    else:
        layer = layer_of(LOOP, *CHANGES[choice])
    found, report = detected(layer, rows())
    check_refused(found, report, REFUSED[choice])


def check_refused(found, report, reason):
    (refused,) = (left for left in found.others if left.is_region)
    assert found.by_kind["capacity"] == ()
    assert (refused.candidate, refused.is_region) == ("region 0", True)
    assert refused.reason is reason and refused.reason.kind is Kind.UNPROVEN, str(refused)
    assert any(verdict.is_unmet for verdict in report.skipped)


@pytest.mark.parametrize("layer", (LOOP, EINSUM), ids=lambda layer: layer.across.name)
def test_an_operator_lost_before_any_weight_is_named(fake_ranks, layer):
    """It was said to be no dispatch: no factor of the rows received had weights."""
    dropped = layer_of(layer, "self.experts(rows,", "self.experts(F.dropout(rows, 0.1),")
    found, report = detected(dropped, rows())
    check_refused(found, report, Reason.EXPERTS_LOST)
    (refused,) = (left for left in found.others if left.is_region)
    assert refused.detail.startswith("`dropout` at ") and "draws random" in refused.detail


def test_rows_of_an_expert_that_does_not_learn_get_no_gradient(fake_ranks):
    layer = layer_of(LOOP, "sent.contiguous()", "sent.detach()")
    for weights in (layer.layer0.w1, layer.layer0.w2):
        weights[0].requires_grad_(False)
    check_refused(*detected(layer, rows()), Reason.NO_GRADIENT)


PLACES = "place = F.one_hot(slot.clamp(max=room - 1), room)"
PLACES_OF_ALL = """room = wait_tensor(all_reduce(slot.max() + 1, "max", self.group)).item()
        torch._check(room > 1)
        place = (slot[..., None] == torch.arange(room))"""
"""As many as the fullest expert of any rank has."""


@pytest.mark.parametrize("layer", (LOOP, EINSUM), ids=lambda layer: layer.across.name)
def test_a_capacity_of_run_time_is_named_and_no_error(fake_ranks, layer):
    """It was said to be no dispatch, without experts with weights of their own."""
    found, report = detected(layer_of(layer, PLACES, PLACES_OF_ALL), rows())
    (refused,) = (left for left in found.others if left.is_region)
    assert found.by_kind["capacity"] == () and refused.reason is Reason.CAPACITY_AT_RUN_TIME
    assert [left.is_dispatch for left in unmatched(found.others)] == [True]
    assert not any(verdict.is_unmet for verdict in report.skipped)


@pytest.mark.parametrize("style", (*DECOYS, SplitAttention), ids=lambda s: s.__name__)
def test_what_else_has_sizes_of_run_time_is_not_said_to_be_a_dispatch(fake_ranks, style):
    if style is SplitAttention:
        program, x = style(16, 8, 8, 8, fake_ranks, torch.float32), torch.randn(2, 4, 16)
    else:
        program, x = style(WIDTH, fake_ranks), torch.randn(32, WIDTH)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    found, _ = detected(program, x.requires_grad_())
    assert not any(left.is_region for left in found.others)


@pytest.mark.parametrize("style", DECOYS, ids=lambda s: s.__name__)
def test_other_even_exchanges_are_no_dispatch_and_not_said_to_be_one(fake_ranks, style):
    found, report = detected(style(WIDTH, fake_ranks), rows())
    assert found.by_kind["capacity"] == ()
    reasons = {Reason.EVEN_SPLITS, Reason.NO_ROWS}
    assert found.others and all(left.reason in reasons for left in found.others)
    assert not any(left.is_dispatch for left in unmatched(found.others))
    assert not any(verdict.is_unmet for verdict in report.skipped)


@pytest.mark.parametrize("style", (SplitAttention, LateNorm), ids=lambda s: s.__name__)
def test_attention_between_exchanges_of_heads_is_no_dispatch(fake_ranks, style):
    """In a region of attention, and where that is refused."""
    attention = style(16, 8, 8, 8, fake_ranks, torch.float32)
    found, _ = detected(attention, torch.randn(2, 4, 16, requires_grad=True))
    assert found.by_kind["capacity"] == ()
    assert not any(left.is_region for left in found.others)


def test_one_local_expert_leaves_nothing_to_split(fake_ranks):
    found, _ = detected(layer_of(dataclasses.replace(LOOP, local=1)), rows())
    assert found.by_kind["capacity"] == ()
    assert {left.reason for left in found.others} == {Reason.EVEN_SPLITS}
