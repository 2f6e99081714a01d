"""Exchanges run under compute, values stay, the order of collectives is structure alone."""

import copy
import dataclasses
import functools
import importlib
import sys

import pytest
import torch
import torch.fx as fx
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.launch_order import collective_order
from moe_compile.graph.query import is_launch
from moe_compile.hardware import load_profile
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState
from passes.schedule_exchanges import HIDDEN, ScheduleExchanges
from passes.verify_schedule import VerifySchedule
from tests.scheduled_layers import (
    ChunkedMoE,
    c10d,
    letters,
    one_rank_group,
    post_grad_graphs,
)
from tests.slow_parameters import slow_but

CPU = load_profile("cpu")
aten = torch.ops.aten


@pytest.fixture(scope="module")
def group():
    return one_rank_group()


def state(hardware=CPU, **options):
    """Return a state with the promise that lets launches pass one another across regions."""
    config = MegaMoEConfig(**{"equal_tokens": True, **options})
    return CompileState(config=config, hardware=hardware)


def schedule(graph, compile_state=None):
    compile_state = compile_state or state()
    report = ScheduleExchanges().run(graph, compile_state)
    VerifySchedule().run(graph, compile_state)
    return report


def layer_graphs(*args, **kwargs):
    """Return copies of the layer's graphs: each test may schedule them in its own way."""
    return copy.deepcopy(compiled_graphs(*args, **kwargs))


@functools.cache
def compiled_graphs(group, chunks, tokens=256, shared=256, dynamic=None, experts=8):
    torch.manual_seed(0)
    layer = ChunkedMoE(128, 256, experts, 2, group, chunks, shared=shared)
    x = torch.randn(tokens, 128, dtype=torch.bfloat16, requires_grad=True)
    return post_grad_graphs(layer, x, dynamic)


# --- what it is for ---------------------------------------------------------------------------


def test_exposed_time_falls_forward_and_backward_for_two_chunks(group):
    shared_state = state(max_memory_increase=1.0)
    for gm in layer_graphs(group, chunks=2):
        measures = schedule(gm.graph, shared_state).measures
        assert measures["exposed_us"] < 0.25 * measures["exposed_us_before"]
        assert measures["step_us"] >= 0.999 * measures["compute_us"]


def test_launches_go_first_and_weight_gradients_fill_the_last_waits(group):
    """The order of the layer's backward, as text: both combines, then experts chunk by chunk."""
    _, backward = layer_graphs(group, chunks=2, shared=0)
    assert letters(backward.graph).startswith("LWmm")
    schedule(backward.graph)
    assert letters(backward.graph).startswith("LLWmmmLWmmmL")
    assert letters(backward.graph).endswith("LmmmmmmmWWm")


RATIOS = {2.0: 1.08, 1.0: 1.25, 0.5: 1.10}
"""Compute over exchanges -> the longest step allowed, over the larger of the two."""


@pytest.mark.parametrize("ratio", slow_but([1.0, 0.5], RATIOS))
def test_four_chunks_and_a_shared_expert_come_near_the_bound(group, ratio):
    """Forward and backward together, exchanges scaled to `ratio` by the link's bandwidth."""
    graphs = layer_graphs(group, chunks=4, tokens=1024, experts=16)
    fast = dataclasses.replace(CPU, op_overhead_us=1.0, link_latency_us=1.0)
    probe = state(fast, schedule=True)
    reports = [schedule(gm.graph, probe) for gm in graphs]
    compute = sum(r.measures["compute_us"] for r in reports)
    links = sum(r.measures["exchange_us"] for r in reports)
    slow = dataclasses.replace(fast, link_gb_per_s=fast.link_gb_per_s * links * ratio / compute)
    again = state(slow)
    steps = sum(schedule(gm.graph, again).measures["step_us"] for gm in graphs)
    assert steps <= RATIOS[ratio] * max(compute, compute / ratio)


# --- one order on all ranks -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_the_order_of_collectives_is_the_same_for_any_token_count(group, chunks):
    """One rank may hold a static graph, another a dynamic one, another one of a single token."""
    orders = []
    for tokens, dynamic in ((64, False), (64, True), (1, False), (48, None)):
        compile_state = state()
        graphs = layer_graphs(group, chunks, tokens=tokens, dynamic=dynamic)
        for gm in graphs:
            schedule(gm.graph, compile_state)
        orders.append([collective_order(gm.graph) for gm in graphs])
    assert all(order == orders[0] for order in orders)
    assert len(orders[0][0][group]) == 1 + 2 * chunks


def test_the_order_of_collectives_does_not_depend_on_rates_or_memory(group):
    orders = []
    for link, cap in ((1e-4, 0.0), (1.0, 0.3), (1e3, 9.0)):
        compile_state = state(dataclasses.replace(CPU, link_gb_per_s=link), max_memory_increase=cap)
        names = []
        for gm in layer_graphs(group, chunks=2):
            schedule(gm.graph, compile_state)
            names.append([n.name for n in gm.graph.nodes if is_launch(n)])
        orders.append(names)
    assert orders[0] == orders[1] == orders[2]


# --- reasons ----------------------------------------------------------------------------------


def test_no_memory_to_spare_keeps_the_peak(group):
    for cap in (0.0, 0.05, 0.3):
        for gm in layer_graphs(group, chunks=4):
            measures = schedule(gm.graph, state(max_memory_increase=cap)).measures
            assert measures["peak_bytes"] <= (1 + cap) * measures["peak_bytes_before"]


def traced(program, *inputs):
    return make_fx(program, tracing_mode="symbolic")(*inputs)


def test_an_exchange_with_nothing_to_run_meanwhile_is_left_alone(group):
    x = torch.randn(64, 64)
    gm = traced(lambda x: c10d.wait_tensor(c10d.all_to_all_single(x, [64], [64], group)) @ x, x)
    before = letters(gm.graph)
    report = schedule(gm.graph)
    assert [v.reason for v in report.skipped] == [Reason.NO_INDEPENDENT_COMPUTE]
    assert not report.changed
    assert letters(gm.graph) == before


def sent_early(x, group):
    flying = c10d.all_to_all_single(x, [64], [64], group)
    meanwhile = x @ x
    return c10d.wait_tensor(flying) @ meanwhile


def test_an_exchange_already_hidden_is_left_alone(group):
    gm = traced(lambda x: sent_early(x, group), torch.randn(64, 64))
    report = schedule(gm.graph)
    assert [(v.reason, v.detail) for v in report.skipped] == [(Reason.ALREADY_DONE, HIDDEN)]


def test_an_exchange_stays_exposed_where_memory_forbids_more(group):
    """Both buffers of the exchange would be alive beside the product."""

    def program(x, w):
        received = c10d.wait_tensor(c10d.all_to_all_single(x + 1, [64], [64], group))
        return received.sum(0), w @ w

    gm = traced(program, torch.randn(64, 64), torch.randn(64, 64))
    report = schedule(gm.graph, state(max_memory_increase=0.3))
    assert [v.reason for v in report.skipped] == [Reason.MEMORY_CAP]
    assert report.measures["peak_bytes"] == report.measures["peak_bytes_before"]
    report = schedule(gm.graph, state(max_memory_increase=0.6))
    assert report.applied
    assert letters(gm.graph) == "LmW"


def test_a_graph_that_switches_streams_is_left_alone(group):
    gm = traced(lambda x: sent_early(x, group), torch.randn(64, 64))
    before = letters(gm.graph)
    importlib.import_module("torch._dynamo.variables.streams")  # registers the operators
    with gm.graph.inserting_before(next(iter(gm.graph.nodes)).next):
        gm.graph.call_function(torch.ops.streams.record_event.default, (0, 0))
    report = schedule(gm.graph)
    assert [v.reason for v in report.skipped] == [Reason.USER_STREAMS]
    assert letters(gm.graph) == before


def test_schedule_off_leaves_the_graph_alone(group):
    gm = traced(lambda x: sent_early(x, group), torch.randn(64, 64))
    report = schedule(gm.graph, state(schedule=False))
    assert not report.applied
    assert not report.skipped


# --- size -------------------------------------------------------------------------------------


def synthetic(num_layers, group):
    """A chain of layers of 40 nodes: exchange, compute that needs it, compute that does not."""
    graph = fx.Graph()

    def node(target, *args):
        made = graph.call_function(target, args)
        made.meta["val"] = torch.empty(64, 64, device="meta")
        return made

    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(64, 64, device="meta")
    grads = []
    for _ in range(num_layers):
        sent = node(c10d.all_to_all_single.default, x, [64], [64], group)
        received = node(c10d.wait_tensor.default, sent)
        y = received
        for _ in range(18):
            y = node(aten.relu.default, node(aten.mm.default, y, x))
        grads.append(node(aten.mm.default, received, received))
        x = y
    graph.output((x, *grads))
    return fx.GraphModule({}, graph)


def calls_to_schedule(graph):
    """Return how many functions of Python are called meanwhile."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        schedule(graph)
    finally:
        sys.setprofile(None)
    return calls


def test_four_times_the_nodes_take_little_more_than_four_times_the_work(group):
    """Counted in calls, not in seconds: a machine may be slow or busy. Quadratic would be 16."""
    few, many = (synthetic(layers, group) for layers in (15, 60))
    assert len(many.graph.nodes) > 2200
    assert calls_to_schedule(many.graph) < 6 * calls_to_schedule(few.graph)
