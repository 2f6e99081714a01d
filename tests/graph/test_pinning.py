"""Inductor runs a scheduled graph in the order the pass left, forward and backward."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import load_profile
from moe_compile.plan.state import CompileState
from moe_compile.testing.wrapper_order import event_letters, wrapper_events
from moe_compile.torch_quirks.inductor_settings import settings_of_ours
from passes.pin_order import pin_order
from passes.schedule_exchanges import ScheduleExchanges
from passes.verify_schedule import VerifySchedule
from tests.scheduled_layers import ChunkedMoE, c10d, exchange, letters, one_rank_group


class Scheduling(CustomGraphPass):
    """What the backend will do, as Inductor's last FX hook."""

    def __init__(self, pin):
        self.pin, self.orders = pin, []
        config = MegaMoEConfig(max_memory_increase=9.0, equal_tokens=True)
        self.state = CompileState(config=config, hardware=load_profile("cpu"))

    def __call__(self, graph):
        ScheduleExchanges().run(graph, self.state)
        VerifySchedule().run(graph, self.state)
        self.orders.append(letters(graph))
        if self.pin:
            assert pin_order(graph)

    def uuid(self):
        return None


def backend_of(scheduling):
    patches = {
        "post_grad_custom_post_pass": scheduling,
        "fx_graph_cache": False,  # generated again; compiled C++ is kept
        **settings_of_ours(is_scheduled=True),
    }
    return functools.partial(compile_fx, config_patches=patches)


def source_of(program, scheduling, *inputs):
    """Run `program` in the order that `scheduling` gives; return what Inductor generated."""
    torch._dynamo.reset()
    compiled = torch.compile(program, backend=backend_of(scheduling))
    with torch.no_grad():
        _, (source,) = run_and_get_code(compiled, *inputs)
    return source


def test_fusion_does_not_pull_a_wait_over_compute():
    """`relu(x)` and `received + 2 * x` read x both: fused, the product would follow the wait."""
    group, scheduling, weight = one_rank_group(), Scheduling(pin=True), torch.randn(64, 64)

    def program(x):
        received = exchange(x, [64], [64], group)
        return received + x * 2, torch.relu(x) @ weight @ weight

    source = source_of(program, scheduling, torch.ones(64, 64))
    assert scheduling.orders == ["LmmW"]
    assert event_letters(wrapper_events(source)) == "LmmW"


def test_fusion_does_not_pull_a_wait_over_attention():
    group, scheduling = one_rank_group(), Scheduling(pin=True)

    def program(x):
        received = exchange(x, [64], [64], group)
        rows = torch.relu(x)
        heads = rows.view(1, 4, 64, 16)
        return received + x * 2, rows, F.scaled_dot_product_attention(heads, heads, heads)

    source = source_of(program, scheduling, torch.ones(64, 64))
    assert event_letters(wrapper_events(source), "LWa") == "LaW"


def test_fusion_does_not_pull_compute_over_the_launch_it_runs_under():
    """Both sums read x: fused, the second would be made before the launch, and the product too."""
    group, scheduling, weight = one_rank_group(), Scheduling(pin=True), torch.randn(64, 64)

    def program(x):
        received = exchange(x * x.sum(1, keepdim=True), [64], [64], group)
        product = weight @ weight
        return received + 1, (product * x).sum(1)

    source = source_of(program, scheduling, torch.ones(64, 64))
    assert scheduling.orders == ["LmW"]
    assert event_letters(wrapper_events(source)) == "LmW"


def test_a_wait_is_held_behind_all_products_since_the_exchange_before_it():
    """Behind the last one alone the others may be computed where they are read: under no link."""
    group, weight = one_rank_group(), torch.randn(64, 64)
    held = []

    class Pinned(Scheduling):
        def __call__(self, graph):
            products = [n.name for n in graph.nodes if n.target is torch.ops.aten.mm.default]
            super().__call__(graph)
            calls = [n for n in graph.nodes if str(n.target) == "control_deps"]
            held.extend((products, [a.name for a in n.args[0]]) for n in calls)

    def program(x):
        received = exchange(x, [64], [64], group)
        return received + 1, torch.cat([f(x) @ weight for f in (torch.cos, torch.sin, torch.exp)])

    source_of(program, Pinned(pin=True), torch.ones(64, 64))
    *products_held, (products, behind_wait) = held
    assert len(products) == 3 and set(products) <= set(behind_wait)
    assert [[name[:10] for name in behind] for _, behind in products_held] == [["all_to_all"]] * 3


def test_a_launch_is_held_behind_the_product_that_the_host_launches_before_it():
    """In front of it the device would stand still while the host launches the exchange."""
    group = one_rank_group()

    def program(x, weight):
        first = c10d.all_to_all_single(x, [64], [64], group)
        product = weight @ weight
        second = c10d.all_to_all_single(x + 1, [64], [64], group)
        return product, *map(c10d.wait_tensor, (first, second))

    graph = make_fx(program)(torch.ones(64, 64), torch.ones(64, 64)).graph
    assert pin_order(graph)
    behind = {
        n.name: [a.name for a in n.args[0]] for n in graph.nodes if "control" in str(n.target)
    }
    assert behind["all_to_all_single_1"] == ["all_to_all_single", "mm"]


def test_what_products_that_are_held_read_in_common_is_computed_once():
    """Rows whose number only a run knows, as those that came are, put in order for experts."""
    group, ends = one_rank_group(), torch.tensor([32, 64], dtype=torch.int32)
    weights, order = torch.randn(2, 64, 64, dtype=torch.bfloat16), torch.randperm(64)
    torch._dynamo.decorators.mark_unbacked(order, 0)

    def program(x, order):
        received = exchange(x, [64], [64], group)
        rows = x[order].cos()
        products = [torch._grouped_mm(rows, weight, offs=ends) for weight in (weights, weights + 1)]
        return received + 1, *products

    x = torch.ones(64, 64, dtype=torch.bfloat16)
    source = source_of(program, Scheduling(pin=True), x, order)
    assert event_letters(wrapper_events(source)) == "LmmW"
    assert len(re.findall(r"^ +cpp_fused\w*_cos_\w*\(", source, re.MULTILINE)) == 1, source


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_generated_wrapper_keeps_the_order(chunks):
    scheduling = Scheduling(pin=True)

    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = ChunkedMoE(64, 64, 8, 2, one_rank_group(), chunks, shared=64)
    x = torch.randn(256, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(layer, backend=backend_of(scheduling), fullgraph=True)
        _, sources = run_fw_bw_and_get_code(lambda: compiled(x))
    forward, backward = scheduling.orders
    assert forward.startswith("mLWL" + "L" * (chunks - 1))
    assert backward.startswith("L" * chunks)
    assert [event_letters(wrapper_events(source)) for source in sources] == [forward, backward]
