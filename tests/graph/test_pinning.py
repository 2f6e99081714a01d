"""Inductor runs a scheduled layer in the order the pass left, forward and backward."""

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_fw_bw_and_get_code

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.pinning import pin_order, pinning_patches
from moe_compile.graph.query import is_launch, is_wait, overload_name
from moe_compile.graph.wrapper_order import event_letters, wrapper_events
from moe_compile.hardware import load_profile
from moe_compile.planning.state import CompileState
from passes.schedule_exchanges import ScheduleExchanges
from passes.verify_schedule import VerifySchedule
from tests.scheduled_layers import ChunkedMoE, one_rank_group


def letters(graph):
    calls = [n for n in graph.nodes if n.op == "call_function"]
    kinds = ["L" if is_launch(n) else "W" if is_wait(n) else overload_name(n) for n in calls]
    return "".join("m" if k.endswith("mm") else k for k in kinds if k in "LW" or k.endswith("mm"))


class Scheduling(CustomGraphPass):
    """What the backend will do, as Inductor's last FX hook."""

    def __init__(self, pin):
        self.pin, self.orders = pin, []
        self.state = CompileState(config=MegaMoEConfig(), hardware=load_profile("cpu"))

    def __call__(self, graph):
        ScheduleExchanges().run(graph, self.state)
        VerifySchedule().run(graph, self.state)
        self.orders.append(letters(graph))
        if self.pin:
            assert pin_order(graph)

    def uuid(self):
        return None


def test_pinning_patches_name_only_settings_this_torch_has():
    with inductor_config.patch(pinning_patches()):
        assert inductor_config.reorder_for_peak_memory is False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patched", "pinned"), [(True, False), (False, True)], ids=["settings", "control_deps"]
)
def test_the_generated_wrapper_keeps_the_order(patched, pinned):
    """Either means alone suffices; without both, Inductor undoes the schedule."""
    scheduling = Scheduling(pinned)
    patches = {"post_grad_custom_post_pass": scheduling, "force_disable_caches": True}
    patches |= pinning_patches() if patched else {}

    def backend(gm, example_inputs):
        return compile_fx(gm, example_inputs, config_patches=patches)

    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = ChunkedMoE(64, 64, 8, 2, one_rank_group(), 2, shared=64)
    x = torch.randn(256, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        _, sources = run_fw_bw_and_get_code(lambda: compiled(x))
    forward, backward = scheduling.orders
    assert forward.startswith("mLWLL")
    assert backward.startswith("LL")
    assert [event_letters(wrapper_events(source)) for source in sources] == [forward, backward]
