"""Our passes on Inductor's hooks take a graph as Inductor leaves it there."""

from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.codegen import LevelPass
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import load_profile
from moe_compile.plan.state import CompileState
from passes.pipeline import JOINT


def test_a_joint_graph_that_is_not_sorted_yet_is_no_obstacle():
    """Inductor's joint patterns append what they make, and sort after our pass: with attention that
    one of them recognised, a pass met a node before its argument."""
    gm = make_fx(lambda x: (x + 1).sin().cos())(torch.ones(3))
    add, sin, _cos = (n for n in gm.graph.nodes if n.op == "call_function")
    sin.append(add)
    state = CompileState(config=MegaMoEConfig(), hardware=load_profile("cpu"))
    LevelPass((JOINT,), state, None)(gm.graph)
    gm.graph.lint()
    gm.recompile()
    x = torch.randn(3)
    assert torch.equal(gm(x), (x + 1).sin().cos())


def uuid(hardware="cpu", **options):
    state = CompileState(config=MegaMoEConfig(**options), hardware=load_profile(hardware))
    return LevelPass((JOINT,), state, None).uuid()


@pytest.mark.parametrize(
    "changes",
    [{"chunks": 3}, {"max_memory_increase": 0.2}, {"schedule": False}, {"hardware": "h100"}],
    ids=str,
)
def test_an_option_and_the_profile_identify_the_passes(changes):
    assert uuid() == uuid()
    assert uuid(**changes) != uuid()


ROOT = Path(__file__).parents[2]
