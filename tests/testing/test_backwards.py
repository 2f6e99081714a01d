"""Every way in which a step of a generated program goes back adds up the same gradients.

So it does with layers in parts.
"""

import pytest
import torch
from torch import nn

from moe_compile.testing.programs.choices import Backward
from moe_compile.testing.programs.steps import Step, accumulated, backwards_of, divide_layers


class Layer(nn.Module):
    """Its second parameter is of nothing."""

    def __init__(self):
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return torch.tanh(x * self.weight), []


class Model(nn.Module):
    """Its first parameter stands before its layer, its second is of a loss alone."""

    def __init__(self):
        super().__init__()
        self.before, self.scale = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.layer = Layer()

    def forward(self, x):
        y, _ = self.layer(x * self.before)
        return y, [(y * self.scale).sum(), torch.ones(2), 7]


def gradients(kind, number=0, num_parts=1):
    model, x = Model(), torch.linspace(-1, 1, 15).view(5, 3).requires_grad_()
    if num_parts > 1:
        divide_layers(model, frozenset({"layer"}), num_parts, 1)
    backwards = backwards_of(kind.name.lower(), number)
    if backwards:
        y, extra = model(x)
        step = Step([y, *extra], torch.full((5, 3), 2.0), x, model)
        for left, go_back in zip(reversed(range(len(backwards))), backwards, strict=True):
            go_back(step, retain=left > 0)
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("num_parts", [1, 2], ids=["whole", "a layer in parts"])
@pytest.mark.parametrize("kind", [k for k in Backward if k is not Backward.NONE])
def test_gradients_are_those_of_one_backward_or_twice_them(kind, num_parts):
    times = 2 if kind is Backward.TWICE else 1
    *some, last = gradients(Backward.ONCE)
    *found, unused = gradients(kind, num_parts=num_parts)
    for ours, theirs in zip(found, some, strict=True):
        torch.testing.assert_close(ours, times * theirs)
    assert last is None and unused is None


def test_steps_without_gradients_go_nowhere():
    assert backwards_of("none", 0) == backwards_of("evaluated", 1) == ()
    assert len(backwards_of("evaluated", 2)) == 1


class CentredRows(nn.Module):
    """Rows that tell in how many parts they were computed, beside values that are no rows."""

    def forward(self, x):
        y = x - x.mean(0)
        return y, [y * 2, y.sum(), torch.ones(2), 7]


def test_rows_beside_the_result_are_those_of_the_parts():
    x, model = torch.arange(10.0).view(5, 2), CentredRows()
    found = accumulated(model, model, x, torch.ones(5, 2), [3, 2], ())
    parts = torch.cat([part - part.mean(0) for part in x.split([3, 2])])
    assert torch.equal(found["output"], parts)
    assert torch.equal(found["extra value 0"], 2 * parts)
    assert not {"extra value 1", "extra value 2", "extra value 3"} & found.keys()
