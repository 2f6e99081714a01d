"""A product that Inductor fused with a sum runs under the exchange that the sum waits for."""

import pytest
import torch
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.query import overload_name
from moe_compile.hardware import load_profile
from moe_compile.plan.state import CompileState
from moe_compile.testing.wrapper_order import event_letters, wrapper_events
from moe_compile.torch_quirks.inductor_settings import settings_of_ours
from passes.pin_order import pin_order
from passes.schedule_exchanges import ScheduleExchanges
from passes.split_addends import SplitAddends
from tests.scheduled_layers import exchange, letters, one_rank_group

X, WEIGHT = torch.randn(64, 64), torch.randn(64, 64)


class Last(CustomGraphPass):
    """Inductor's last hook on a graph: splits and schedules, or only looks."""

    def __init__(self, *, splits):
        self.splits, self.before, self.after, self.letters, self.applied = splits, [], [], "", ()
        config = MegaMoEConfig(max_memory_increase=9.0, equal_tokens=True)
        self.state = CompileState(config=config, hardware=load_profile("cpu"))

    def __call__(self, graph):
        self.before = products(graph)
        if self.splits:
            self.applied = SplitAddends().run(graph, self.state).applied
        self.after = products(graph)
        graph.lint()
        ScheduleExchanges().run(graph, self.state)
        self.letters = letters(graph)
        pin_order(graph)

    def uuid(self):
        return None


def products(graph):
    names = (overload_name(node).removeprefix("aten::") for node in graph.nodes)
    return [name for name in names if name in ("mm", "addmm")]


def compiled(program, *, splits=True):
    """Return the result, what the last hook saw, and the order of launches, products and waits."""
    last = Last(splits=splits)
    settings = settings_of_ours(is_scheduled=True)
    patches = {"post_grad_custom_post_pass": last, "fx_graph_cache": False, **settings}

    def backend(gm, example_inputs):
        return compile_fx(gm, example_inputs, config_patches=patches)

    torch._dynamo.reset()
    with torch.no_grad():
        result, (source,) = run_and_get_code(torch.compile(program, backend=backend), X)
    return result, last, event_letters(wrapper_events(source))


def shared_and_routed(x):
    return exchange(x, [64], [64], one_rank_group()) + torch.relu(x) @ WEIGHT


def test_a_fused_sum_is_taken_out_of_its_product():
    """Without the pass the product stands behind the wait, and hides nothing of the exchange."""
    _, fused, order = compiled(shared_and_routed, splits=False)
    assert fused.before == ["addmm"] and order == "LWm"
    result, split, order = compiled(shared_and_routed)
    assert (split.before, split.after) == (["addmm"], ["mm"])
    assert split.letters == order == "LmW" and len(split.applied) == 1
    assert torch.equal(result, X + torch.relu(X) @ WEIGHT)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lambda x: torch.relu(x) + x @ WEIGHT, id="no exchange"),
        pytest.param(
            lambda x: (y := exchange(x, [64], [64], one_rank_group())) + torch.relu(y) @ WEIGHT,
            id="the product needs the exchange too",
        ),
        pytest.param(
            lambda x: torch.addmm(exchange(x, [64], [64], one_rank_group()), x, WEIGHT),
            id="the program asks for one operator",
        ),
    ],
)
def test_other_products_stay_as_they_are(program):
    _, last, _ = compiled(program)
    assert last.before == last.after == ["addmm"] and last.applied == ()
