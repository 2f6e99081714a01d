"""A program in which a pass failed is kept in no cache: every process compiles it without it."""

import uuid
from unittest import mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.codegen import compile_with_inductor, plan_of
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import load_profile
from moe_compile.journal.entries import PassReport
from moe_compile.plan.state import CompileState
from moe_compile.report.process_report import REPORT
from passes.compress_gradients import CompressGradients
from passes.save_exchanges import SaveExchanges
from tests.backend.inductor_runs import counters

JOINT = "joint_custom_post_pass"


def failing(self, graph, state):
    raise IndexError("tuple index out of range")


def program():
    return make_fx(lambda x: x + 1)(torch.ones(3))


def state_of_one_program(**options):
    config = MegaMoEConfig(**options)
    return CompileState(config=config, hardware=load_profile("cpu"), has_work=True)


def compiled(state):
    """Compile with `state`; return each attempt's key, and the pass on joint graphs."""
    keys = []

    def compile_fx(gm, inputs, inner_compile, config_patches):
        keys.append(config_patches[JOINT].uuid())
        config_patches[JOINT](program().graph)
        return config_patches[JOINT]

    with mock.patch("moe_compile.codegen.compile_fx", compile_fx):
        return keys, compile_with_inductor(program(), [], state, {})


def test_the_compilation_ends_and_begins_anew_under_another_key(monkeypatch):
    monkeypatch.setattr(SaveExchanges, "run", failing)
    state = state_of_one_program()
    keys, _ = compiled(state)
    assert len(keys) == len(set(keys)) == 2
    assert state.dropped == ["save_exchanges joint"]
    (said,) = state.journal.dropped()
    assert said[1].detail == "IndexError: tuple index out of range"
    assert plan_of(state) != plan_of(state_of_one_program())


def test_a_pass_that_is_switched_off_ends_nothing():
    state = state_of_one_program(disable_passes=("save_exchanges",))
    keys, _ = compiled(state)
    assert len(keys) == 1 and state.dropped == []


def test_errors_of_others_pass():
    with (
        mock.patch("moe_compile.codegen.compile_fx", side_effect=ZeroDivisionError),
        pytest.raises(ZeroDivisionError),
    ):
        compile_with_inductor(program(), [], state_of_one_program(), {})


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_process_that_finds_the_program_in_a_cache_meets_the_failure_too(monkeypatch, direction):
    """Also that of a backward: without host reads AOTAutograd compiles it as it first runs."""

    def fails(self, graph, state):
        if state.is_backward is (direction == "backward"):
            raise IndexError("tuple index out of range")
        return PassReport(pass_name=self.name)

    monkeypatch.setattr(CompressGradients, "run", fails)
    seen = []
    with torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())):
        for _ in range(2):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            before, x = len(REPORT.compilations), torch.ones(3, requires_grad=True)
            options = {"megamoe.gradient_wire": "bf16_fp32_sum"}
            ours = torch.compile(lambda x: x * 2, backend="megamoe", options=options)
            ours(x).sum().backward()
            assert torch.equal(x.grad, torch.full((3,), 2.0))
            (compilation,) = REPORT.compilations[before:]
            (dropped,) = compilation.dropped
            assert dropped.startswith(f"compress_gradients {direction}: IndexError")
            seen.append(counters()["program_hit"])
    assert seen == [0, 1]
