"""torch's own bisector finds a wrong pass of ours by its name."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.compiler_bisector import CompilerBisector
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.backend import megamoe
from moe_compile.codegen import LevelPass, plan_of
from moe_compile.journal.entries import Dropped, PassReport
from moe_compile.journal.reasons import Reason
from moe_compile.testing.rank_pool import forget_compiled
from passes.contract import GraphPass
from passes.pipeline import DYNAMO, JOINT, POST_GRAD, Level, run_level
from tests.capture import state


@dataclass(frozen=True)
class Right(GraphPass):
    name: ClassVar[str] = "right"

    def run(self, graph, state):
        return PassReport(pass_name=self.name)


@dataclass(frozen=True)
class Wrong(GraphPass):
    """Turns every sum into a product."""

    name: ClassVar[str] = "wrong"

    def run(self, graph, state):
        sums = [n for n in graph.nodes if "add" in str(n.target)]
        for node in sums:
            node.target = torch.ops.aten.mul.Tensor
        return PassReport(pass_name=self.name, applied=tuple(n.name for n in sums))


@dataclass(frozen=True)
class WrongCheck(Wrong):
    name: ClassVar[str] = "wrong_check"
    is_check: ClassVar[bool] = True


@dataclass(frozen=True)
class WrongAndNeeded(Wrong):
    name: ClassVar[str] = "wrong_and_needed"
    is_needed: ClassVar[bool] = True


def program(x):
    return x * 2 + x


def run_by(level):
    """Return whether values are right of a graph on which a level ran, and what was left out."""
    gm, ours = make_fx(program)(torch.ones(3)), state()
    results = run_level(level, gm.graph, ours)
    gm.recompile()
    return torch.equal(gm(torch.ones(3)), program(torch.ones(3))), results, ours


def of_inductor(level):
    """Return a question for torch's bisector: all but Inductor is right."""

    def is_right():
        return CompilerBisector.get_backend() != "inductor" or run_by(level)[0]

    return is_right


@pytest.mark.parametrize(
    ("level", "subsystem"),
    [(DYNAMO, "pre_grad_passes"), (JOINT, "joint_graph_passes"), (POST_GRAD, "post_grad_passes")],
)
def test_a_wrong_pass_is_found_at_every_level(level, subsystem):
    passes = (Right(), Right(), Wrong(), Right(), Right(), Right())
    found = CompilerBisector.do_bisect(of_inductor(replace(level, passes=passes)))
    assert (found.backend, found.subsystem, found.bisect_number) == ("inductor", subsystem, 2)
    assert found.debug_info == "megamoe's pass wrong, on the dynamo graph"


@pytest.mark.parametrize("wrong", [WrongCheck(), WrongAndNeeded()])
def test_a_check_and_what_mends_torch_is_never_left_out(wrong):
    found = CompilerBisector.do_bisect(of_inductor(Level((Right(), wrong))))
    assert found.backend == "inductor" and found.subsystem is None


def test_a_compiled_program_is_searched_where_torch_keeps_a_backend_that_is_no_name(monkeypatch):
    forget_compiled()
    keep = "test_configs.bisect_keep_custom_backend_for_inductor"
    if keep not in inductor_config.get_config_copy():
        pytest.skip("this torch keeps no backend")
    monkeypatch.setattr("passes.pipeline.DYNAMO", replace(DYNAMO, passes=(Right(), Wrong())))
    x = torch.ones(3)

    def is_right():
        torch._dynamo.reset()
        compiled = torch.compile(program, backend=megamoe, options={"megamoe.codegen": "fx"})
        return torch.equal(compiled(x), program(x))

    with inductor_config.patch(keep, True):
        found = CompilerBisector.do_bisect(is_right)
    assert found.subsystem == "pre_grad_passes" and "pass wrong," in found.debug_info


def test_what_is_left_out_is_compared_among_ranks_and_kept_out_of_caches(monkeypatch):
    def all_but_the_first(backend, subsystem, said):
        del subsystem
        return backend == "inductor" and "wrong" in said()

    level = Level((Right(), Wrong()))
    assert LevelPass((level,), state(), None).uuid() is not None
    monkeypatch.setattr(CompilerBisector, "bisection_enabled", True)
    monkeypatch.setattr(CompilerBisector, "disable_subsystem", all_but_the_first)
    is_right, results, ours = run_by(level)
    assert is_right and results[1] == Dropped(
        "wrong", Reason.DISABLED, "torch's compiler bisector leaves it out of this run"
    )
    ours.has_work, other = True, state()
    other.has_work = True
    assert plan_of(ours) != plan_of(other)
    assert LevelPass((level,), ours, None).uuid() is None
