"""Experts with a capacity are told from everything else that even exchanges carry."""

import pytest
import torch

from moe_compile.journal.reasons import Kind, Reason
from moe_compile.report.compilations import unmatched
from passes.detect_regions import DetectRegions
from tests.attention_layers import LateNorm, SplitAttention
from tests.capacity_layers import (
    DECOYS,
    REFUSED,
    STYLES,
    BiasedDeepSpeed,
    DeepSpeed,
    GShardEinsum,
    Mesh,
    undropped,
)
from tests.capture import dynamo_graphs, state
from tests.slow_parameters import one_per_reason

WIDTH, HIDDEN, LOCAL, TOP_K = 16, 24, 4, 2


def detected(program, *inputs):
    (gm,) = dynamo_graphs(program, *inputs)
    found = state(chunks=2)
    report = DetectRegions().run(gm.graph, found)
    return found.found, report


def layer(style, group, local=LOCAL):
    return style(WIDTH, HIDDEN, local, TOP_K, 1.0, group)


def rows(count=32, width=WIDTH):
    return torch.randn(count, width, requires_grad=True)


@pytest.mark.parametrize("style", (*STYLES, BiasedDeepSpeed), ids=lambda s: s.__name__)
def test_every_style_is_one_region_with_its_exchanges(fake_ranks, style):
    found, report = detected(layer(style, fake_ranks), rows())
    (one,) = found.by_kind["capacity"]
    assert (one.region.num_ranks, one.region.num_local_experts) == (2, LOCAL)
    assert found.others == () and found.experts == ()
    assert report.applied == ("region 0",)
    marks = {str(launch.meta["custom"]) for launch in one.region.launches}
    assert len(marks) == 1, "both exchanges are of one region"


def test_two_layers_are_two_regions(fake_ranks):
    first, second = layer(DeepSpeed, fake_ranks), layer(Mesh, fake_ranks)
    found, _ = detected(lambda x: second(first(x)[0])[0], rows())
    assert [one.region.name for one in found.by_kind["capacity"]] == ["region 0", "region 1"]


@pytest.mark.parametrize("style", one_per_reason(REFUSED), ids=lambda s: s.__name__)
def test_what_is_meant_and_not_proven_is_refused_with_its_reason(fake_ranks, style):
    found, report = detected(layer(style, fake_ranks), rows())
    (refused,) = (left for left in found.others if left.is_region)
    assert found.by_kind["capacity"] == ()
    assert (refused.candidate, refused.is_region) == ("region 0", True)
    assert refused.reason is REFUSED[style] and refused.reason.kind is Kind.UNPROVEN, str(refused)
    assert any(verdict.is_unmet for verdict in report.skipped)


@pytest.mark.parametrize("style", (DeepSpeed, GShardEinsum), ids=lambda s: s.__name__)
def test_a_capacity_of_run_time_is_named_and_no_error(fake_ranks, style):
    """It was said to be no dispatch, without experts with weights of their own."""
    found, report = detected(layer(undropped(style), fake_ranks), rows())
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
    found, _ = detected(layer(DeepSpeed, fake_ranks, local=1), rows())
    assert found.by_kind["capacity"] == ()
    assert {left.reason for left in found.others} == {Reason.EVEN_SPLITS}
