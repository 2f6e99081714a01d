"""CUDA graphs that a user asks for: which settings Inductor gets, and when they are off."""

from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor import cudagraph_utils
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moe_compile.report.process_report import REPORT
from moe_compile.testing.mirrored_rank import MirroredGroup
from moe_compile.testing.process_groups import new_group_of
from moe_compile.torch_quirks import cuda_graphs
from moe_compile.torch_quirks.cuda_graphs import (
    ASKED,
    OPS,
    SIZES,
    Inputs,
    capture_settings,
    why_no_captures,
    why_no_captures_of,
)
from moe_compile.torch_quirks.inductor_settings import REORDERINGS
from tests.capture import dynamo_graphs
from tests.layers import GroupedExperts
from tests.scheduled_layers import one_rank_group
from tests.torch_quirks.test_inductor_settings import compiled_with

MODE = torch._inductor.list_mode_options("reduce-overhead")
can_capture = pytest.mark.skipif(bool(why_no_captures(MODE)), reason=why_no_captures(MODE) or "can")


def layer_and_rows(group):
    layer = GroupedExperts(16, 16, 4, 1, group)
    return layer, torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)


@can_capture
@pytest.mark.parametrize("asked", [{"mode": "reduce-overhead"}, {"options": {ASKED: True}}])
def test_a_mode_or_an_option_that_asks_for_cuda_graphs_gets_them_in_our_order(fake_ranks, asked):
    settings, warnings = compiled_with(*layer_and_rows(fake_ranks), **asked)
    assert settings[ASKED] is True and settings["graph_partition"] is True
    assert not any(settings[name] for name in REORDERINGS if name in settings)
    assert warnings == []
    outside = set(settings[OPS])
    assert {f"_c10d_functional::{op}" for op in ("all_to_all_single", "wait_tensor")} <= outside
    assert {"megamoe::measured_wait", "ao::offload", "ao::reload", "ao::wait_tensor"} <= outside
    assert settings[SIZES] == ["megamoe::step_sizes"]


@can_capture
def test_operators_that_the_user_keeps_out_stay_out():
    theirs = {OPS: ["mine::op"], SIZES: ["mine::sizes"]}
    ours = capture_settings({**MODE, **theirs})
    assert "mine::op" in ours[OPS] and "mine::sizes" in ours[SIZES]
    with inductor_config.patch(theirs):
        assert capture_settings(MODE) == ours


def test_they_are_off_where_a_setting_takes_the_graph_whole(fake_ranks):
    if "cudagraph_policy" not in inductor_config.get_config_copy():
        pytest.skip("this torch has no policy")
    policy = cudagraph_utils.CUDAGraphPolicy()
    options = {ASKED: True, "cudagraph_policy": policy}
    settings, (warning,) = compiled_with(*layer_and_rows(fake_ranks), options=options)
    assert settings[ASKED] is False
    assert "triton.cudagraphs are off" in warning and "captures a graph as a whole" in warning
    assert "benchmarks" not in warning
    assert ASKED in REPORT.as_dict()["inductor_settings_off"]


@can_capture
@pytest.mark.parametrize(
    ("patches", "said"),
    [
        ({"cpp_wrapper": True}, "cpp_wrapper is True"),
        ({"triton.cudagraph_trees": False}, "triton.cudagraph_trees is False"),
    ],
)
def test_it_is_said_what_stands_in_the_way(patches, said):
    assert said in why_no_captures(patches)
    assert "bound_captures" in why_no_captures(MODE, ("bound_captures",))


def test_a_collective_of_several_tensors_stands_in_the_way():
    """A part behind it would be given a list."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops._c10d_functional.all_reduce, (x, "sum", "0"))
    inner = fx.GraphModule({}, graph)
    assert why_no_captures_of(inner) == ""
    graph.call_function(torch.ops._c10d_functional.all_reduce_coalesced, ([x], "sum", "0"))
    outer = fx.GraphModule({}, fx.Graph())
    outer.body = inner
    assert "all_reduce_coalesced returns several tensors" in why_no_captures_of(outer)


def test_a_torch_without_the_settings_says_which(monkeypatch):
    older = {k: v for k, v in inductor_config.get_config_copy().items() if k != SIZES}
    without = SimpleNamespace(get_config_copy=lambda: older)
    monkeypatch.setattr(cuda_graphs, "inductor_config", without)
    assert SIZES in why_no_captures(MODE)
    monkeypatch.undo()
    monkeypatch.setattr(cuda_graphs, "write_step_sizes", lambda: False)
    assert "lacks" in why_no_captures(MODE)


def test_weights_that_fsdp_gathers_are_not_steady(fake_ranks):
    """Each gathering puts them elsewhere; the input of the program may be anywhere in any case."""
    del fake_ranks
    linear = torch.nn.Linear(4, 4)
    (gm,) = dynamo_graphs(linear, torch.ones(2, 4))
    weights = _places_of_parameters(gm)
    assert Inputs.of(gm) == Inputs(3, weights, frozenset())
    fully_shard(linear, mesh=init_device_mesh("cpu", (2,)))
    found = []

    def keep(gm, example_inputs):
        del example_inputs
        found.append((Inputs.of(gm), _places_of_parameters(gm)))
        return gm

    linear.forward = torch.compile(linear.forward, backend=keep, fullgraph=True)
    linear(torch.ones(2, 4))
    ((inputs, weights),) = found
    assert inputs == Inputs(3, frozenset(), weights) and len(weights) == 2


def _places_of_parameters(gm):
    values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    return frozenset(n for n, one in enumerate(values) if isinstance(one, torch.nn.Parameter))


@pytest.fixture
def one_rank():
    one_rank_group()
    return new_group_of(MirroredGroup, lambda *_: MirroredGroup(1), ["cpu"])


@pytest.mark.slow
@can_capture
def test_on_a_cpu_the_marks_leave_no_trace_and_the_bits_are_the_same(one_rank):
    """Nothing is captured there."""

    def run(**options):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = GroupedExperts(16, 24, 4, 2, one_rank)
        x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
        ours = {"megamoe.chunks": 2, "megamoe.hardware": "cpu", **options}
        compiled = torch.compile(layer, backend="megamoe", fullgraph=True, options=ours)
        with inductor_config.patch(fx_graph_cache=False):
            y, codes = run_fw_bw_and_get_code(lambda: compiled(x))
        lines = [line for code in codes for line in code.splitlines()]
        return y, x.grad, [li for li in lines if "torch.ops." in li and "record_launches" not in li]

    plain, captured = run(), run(**{ASKED: True, "force_pointwise_cat": True})
    assert torch.equal(plain[0], captured[0]) and torch.equal(plain[1], captured[1])
    assert not any("step_sizes" in line or "moving_input" in line for line in captured[2])
