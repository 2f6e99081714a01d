"""What ranks compare: the user's collectives, and decisions; no sizes, prices or prose."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from moe_compile.backend import rewrite
from moe_compile.codegen import plan_of
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.user_order import user_order
from moe_compile.runtime import agree_on_machine
from tests.capture import dynamo_graphs
from tests.layers import GroupedExperts, LoopExperts
from tests.slow_parameters import slow_but

PLANNED = MegaMoEConfig(chunks="auto", equal_tokens=True, attention_chunks=1)


def graph(group, tokens=32, style=GroupedExperts, wrap=lambda layer: layer, width=16):
    x = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    return dynamo_graphs(wrap(style(width, 24, 8, 2, group)), x)[0]


def orders(gm):
    return {group: order.digest for group, order in user_order(gm).items()}


def plan(gm, config):
    return plan_of(rewrite(gm, config)[0])


def test_the_users_order_says_nothing_of_sizes_or_of_the_code_around(fake_ranks):
    one, other = graph(fake_ranks, 32), graph(fake_ranks, 48, LoopExperts)
    assert orders(one) == orders(other)
    (order,) = user_order(one).values()
    assert order.collectives == (
        "all_to_all_single(int64)",
        "all_to_all_single(bfloat16)",
        "all_to_all_single(bfloat16)",
    )


def test_bodies_of_checkpoints_count_where_they_are_called(fake_ranks):
    def checkpointed(layer):
        return lambda x: checkpoint(layer, x, use_reentrant=False)

    assert orders(graph(fake_ranks, wrap=checkpointed)) == orders(graph(fake_ranks))
    twice = graph(fake_ranks, wrap=lambda layer: lambda x: layer(checkpointed(layer)(x)))
    (order,) = user_order(twice).values()
    assert len(order.collectives) == 6


def test_ranks_of_unlike_machines_that_decide_alike_have_one_plan(fake_ranks):
    """The report's prose was hashed, predicted milliseconds included: such ranks were stopped."""
    config = dataclasses.replace(PLANNED, chunks=2)
    plans = {
        plan(graph(fake_ranks), dataclasses.replace(config, hardware=name))
        for name in ("h100", "h200", "h800")
    }
    assert len(plans) == 1


CHANGES = [
    {"chunks": 4},
    {"dispatch_wire": "fp8"},
    {"schedule": False},
    {"disable_passes": ("fold_row_moves",)},
]


@pytest.mark.parametrize(
    "change",
    slow_but(CHANGES[::3], CHANGES),
    ids=str,
)
def test_ranks_that_decide_otherwise_have_other_plans(fake_ranks, change):
    config = MegaMoEConfig(chunks=2)
    assert plan(graph(fake_ranks), config) != plan(
        graph(fake_ranks), dataclasses.replace(config, **change)
    )


def test_ranks_that_gather_other_numbers_of_rows_have_other_plans(fake_ranks):
    """Tokens without a static number: what is compared said nothing of the rows of each."""
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    config = MegaMoEConfig(dispatch="all_gather", equal_tokens=True, chunks=1, strict=True)
    one, other = (
        plan(dynamo_graphs(GroupedExperts(16, 24, 8, top_k, fake_ranks), x)[0], config)
        for top_k in (2, 3)
    )
    assert one != other


def test_what_runs_as_written_has_no_plan(fake_ranks):
    (gm,) = dynamo_graphs(lambda x: x * 2 + 1, torch.ones(3))
    assert plan(gm, MegaMoEConfig()) == ""


def test_a_pass_that_failed_later_is_part_of_the_plan(fake_ranks):
    state, _ = rewrite(graph(fake_ranks), MegaMoEConfig(chunks=2))
    before = plan_of(state)
    state.dropped.append("schedule_exchanges forward")
    assert plan_of(state) != before


def test_a_mixed_cluster_plans_for_the_slowest_link():
    for profiles in (["h200", "a100", "h100"], ["h100", "a100", "h200"]):
        assert agree_on_machine.slowest(profiles) == "a100"


def test_without_a_process_group_each_rank_goes_by_its_own_machine():
    assert not dist.is_initialized() or dist.get_backend() == "fake"
    agree_on_machine.agree_on_machines()
