"""What a check asks of a program that trains: here one of plain PyTorch, on one rank."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_compile.check.forms import AS_WRITTEN, PRECISE, Form, Forms
from moe_compile.check.marks import distance, first_difference
from moe_compile.check.same import Same, Trials, check_same
from moe_compile.check.sections import Record
from moe_compile.check.steps import trace
from moe_compile.check.team import Team
from moe_compile.config import MegaMoEConfig
from moe_compile.testing.rank_pool import forget_compiled


class Script:
    """Two layers behind switches, trained by SGD with momentum."""

    device = torch.device("cpu")

    def __init__(self):
        forget_compiled()
        torch.manual_seed(0)
        self.forms = Forms()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.blocks = [self.forms.switch(one.forward, {}, one.forward) for one in self.model]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.start = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        self.x = torch.randn(32, 64)

    def restore(self):
        self.model.load_state_dict(self.start[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.start[1]))

    def step(self, *, is_told=False):
        del is_told
        self.optimizer.zero_grad()
        out = self.x
        for block in self.blocks:
            out = block(out).relu()
        self.loss = out.square().mean()
        self.loss.backward()
        self.optimizer.step()

    def losses(self):
        return [self.loss.item()]

    def gradients(self):
        for name, parameter in reversed([*self.model.named_parameters()]):
            yield f"gradient of {name}", parameter.grad

    def seen(self):
        yield "loss", self.loss
        yield from self.gradients()
        yield from self.model.named_parameters()


def wrong_backward(gm, inputs):
    """Return a graph whose second layer has a wrong gradient alone."""
    del inputs

    def run(*given):
        (out,) = gm.forward(*given)
        out.register_hook(lambda gradient: gradient * 1.001)
        return (out,)

    return run


def wrong_forward(gm, inputs):
    del inputs
    return lambda *given: (gm.forward(*given)[0] * 1.001,)


@pytest.mark.parametrize(
    ("backend", "first"),
    [
        ("eager", None),
        (wrong_forward, "step 1: output of block 1"),
        (wrong_backward, "step 1: gradient of 1.bias"),
    ],
)
def test_the_first_difference_is_where_the_computation_parts(backend, first):
    job = Script()
    written = trace(job, AS_WRITTEN, 2)
    assert first_difference(written.marks, trace(job, AS_WRITTEN, 2).marks) is None
    found = first_difference(written.marks, trace(job, Form(name="x", backend=backend), 2).marks)
    assert (found and found.name) == first


def test_gradients_in_float64_are_near_those_as_written_and_not_equal():
    job = Script()
    precise = trace(job, PRECISE, 1, keeps=True)
    written = trace(job, AS_WRITTEN, 1, reference=precise.gradients)
    assert 1e-9 < distance(written.squares.values()) < 1e-6


def test_float64_is_left_on_all_ranks_where_one_has_none():
    same = Same(Script(), MegaMoEConfig(), 1)
    assert same.run_precise() == ""
    same.settle("")
    assert same.run_precise() == ""
    same.settle("OutOfMemoryError")
    assert same.run_precise() == "OutOfMemoryError"


def test_a_script_is_checked_as_a_job_is(tmp_path):
    """It has no experts: what megamoe does not rewrite shows nothing."""
    record = Record(path=tmp_path / "same.json", deadline=time.monotonic() + 900)
    team = Team(dist.HashStore(), 0, 1, record=record, makes_groups=False)
    check_same(Trials(team, Script(), MegaMoEConfig(codegen="fx"), 2))
    assert [row["holds"] for row in record.data["rows"]] == [True] * 3
    (failure,) = record.data["failures"]
    assert failure["what"] == "megamoe, node by node" and "show nothing" in failure["why"]
