"""Every way in which a step of a generated program goes back adds up the same gradients."""

import pytest
import torch
from torch import nn

from moe_compile.testing.programs.choices import Backward
from moe_compile.testing.programs.steps import Step, backwards_of


class Model(nn.Module):
    """Its second parameter is of a loss alone, its last of nothing."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale, self.unused = (nn.Parameter(torch.ones(3)) for _ in range(3))

    def forward(self, x):
        y = torch.tanh(x * self.weight)
        return y, [(y * self.scale).sum(), torch.ones(2), 7]


def gradients(kind, number=0):
    model, x = Model(), torch.linspace(-1, 1, 3).requires_grad_()
    backwards = backwards_of(kind.name.lower(), number)
    if backwards:
        y, extra = model(x)
        step = Step([y, *extra], torch.full((3,), 2.0), x, model)
        for left, go_back in zip(reversed(range(len(backwards))), backwards, strict=True):
            go_back(step, retain=left > 0)
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("kind", [k for k in Backward if k is not Backward.NONE])
def test_gradients_are_those_of_one_backward_or_twice_them(kind):
    times = 2 if kind is Backward.TWICE else 1
    *some, last = gradients(Backward.ONCE)
    for ours, theirs in zip(gradients(kind), some, strict=False):
        torch.testing.assert_close(ours, times * theirs)
    assert last is None and gradients(kind)[-1] is None


def test_steps_without_gradients_go_nowhere():
    assert backwards_of("none", 0) == backwards_of("evaluated", 1) == ()
    assert len(backwards_of("evaluated", 2)) == 1
