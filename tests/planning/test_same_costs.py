"""The scheduler and the planner take the same time for the same work."""

import dataclasses

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.graph.query import is_launch
from moe_compile.hardware import load_profile
from moe_compile.planning.candidates import Candidate
from moe_compile.planning.cost_model import estimate_costs
from moe_compile.planning.rates import Rates
from moe_compile.planning.region_tasks import price_us
from moe_compile.planning.region_work import RegionWork
from moe_compile.planning.sizes import NominalSizes
from moe_compile.planning.work_reader import Replayed, read_work
from tests.capture import dynamo_graphs
from tests.scheduled_layers import c10d, one_rank_group


def chain(num_ranks, group):
    """One operator after another: the price is a sum, and nothing overlaps."""
    splits = [16] * num_ranks

    def program(x, left, right):
        sent = c10d.all_to_all_single(x @ left, splits, splits, group)
        return torch.softmax(c10d.wait_tensor(sent) @ right, -1)

    return program


@pytest.mark.parametrize("profile", ["h100", "h800", "cpu"])
@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_a_chain_costs_the_scheduler_what_it_costs_the_planner(profile, num_ranks):
    group = one_rank_group()
    inputs = (
        torch.ones(16 * num_ranks, 256).bfloat16(),
        torch.ones(256, 512).bfloat16(),
        torch.ones(512, 128).bfloat16(),
    )
    program = chain(num_ranks, group)
    # what a launch takes of the compute stream is the scheduler's alone
    hardware = dataclasses.replace(load_profile(profile), op_overhead_us=0.0)

    post_grad = make_fx(program, tracing_mode="fake")(*inputs).graph
    scheduled = estimate_costs(post_grad, NominalSizes({}), hardware).values()
    assert sum(cost.link_us for cost in scheduled) > 0.0

    graph = dynamo_graphs(program, *inputs)[0].graph
    (launch,) = [node for node in graph.nodes if is_launch(node)]
    replayed = Replayed(nodes=(), exchanges={launch: "dispatch"})
    work = read_work(graph, frozenset(graph.nodes), replayed)
    forward = tuple(dataclasses.replace(w, backward=0.0) for w in work)
    region = RegionWork(work=forward, num_ranks=num_ranks, num_parts=1, row_bytes=0.0)
    planned = price_us(region, Candidate(), Rates.of(hardware, num_ranks))

    assert planned == pytest.approx(sum(c.compute_us + c.link_us for c in scheduled))
