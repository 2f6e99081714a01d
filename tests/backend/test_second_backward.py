"""A compiled program goes back as often as an eager one does, by `backward` and by `grad`."""

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_inductor_cache

from moe_compile.errors import SecondOrderGradient
from tests.layers import Centred, GroupedExperts
from tests.slow_parameters import slow_but


def once(layer, function, x):
    function(x).sum().backward()


def retained(layer, function, x):
    out = function(x)
    out.sum().backward(retain_graph=True)
    out.square().sum().backward()


def two_grads(layer, function, x):
    out, parameters = function(x), list(layer.parameters())
    first = torch.autograd.grad(out.sum(), parameters, retain_graph=True)
    second = torch.autograd.grad(out.square().sum(), parameters)
    for parameter, one, other in zip(parameters, first, second, strict=True):
        parameter.grad = one + 3 * other


def created(layer, function, x):
    (gradient,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    x.grad = gradient.detach()


FORMS = (once, retained, two_grads, created, retained)
"""One after another: the first of them decides nothing for those that follow."""
ROUNDED = 0.02
"""Of a gradient's norm: rows of bfloat16 are rounded elsewhere. Inductor alone is off by 0.01."""


def gradients(form, layer, function, x):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    form(layer, function, x)
    return [t.grad for t in (x, *layer.parameters())]


def compiled(style, codegen):
    torch._dynamo.reset()
    layer = style(16, 24, 8, 2, dist.group.WORLD)
    options = {"megamoe.codegen": codegen, "megamoe.chunks": 2}
    return layer, torch.compile(layer, backend="megamoe", fullgraph=True, options=options)


def is_near(ours, theirs, bound):
    return (ours - theirs).float().norm() <= bound * theirs.float().norm()


def differing_forms(rank, style, codegen):
    eager = style(16, 24, 8, 2, dist.group.WORLD)
    layer, function = compiled(style, codegen)
    differing = []
    for number, form in enumerate(FORMS):
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(rank + number)).bfloat16()
        pairs = zip(
            gradients(form, eager, eager, x), gradients(form, layer, function, x), strict=True
        )
        # eagerly, a gradient that has a gradient is computed by other formulas
        bound = 0.0 if codegen == "fx" and form is not created else ROUNDED
        for ours, theirs in pairs:
            is_alike = ours is theirs is None or is_near(ours, theirs, bound)
            differing += [] if is_alike else [form.__name__]
    return differing


@pytest.mark.parametrize("style", slow_but([GroupedExperts], [GroupedExperts, Centred]))
def test_every_form_of_a_second_backward_has_the_values_of_eager(mirrored_ranks, style):
    """'compiled with non-empty donated buffers': sizes that are read have it compiled ahead."""
    assert not any(mirrored_ranks.run(differing_forms, style, "fx"))


@pytest.mark.slow
@pytest.mark.parametrize("style", [GroupedExperts, Centred])
def test_code_of_inductor_keeps_what_was_saved(mirrored_ranks, style):
    assert not any(mirrored_ranks.run(differing_forms, style, "inductor"))


def scaled(x, weight, number):
    h = x @ weight
    return h.sin().sum(1) * (number + 1).item()


@pytest.mark.slow
def test_so_does_code_that_inductor_finds_in_its_cache_and_aotautograd_does_not():
    """Where only Inductor knows a graph none of its passes runs: these would come too late."""
    tensors = torch.randn(8, 4), torch.randn(4, 4)
    scalars = torch._dynamo.config.patch(capture_scalar_outputs=True)
    with fresh_inductor_cache(), functorch_config.patch(enable_autograd_cache=False), scalars:
        for hits in (0, 2):
            torch._dynamo.reset()
            counters.clear()
            x, weight = (t.clone().requires_grad_() for t in tensors)
            out = torch.compile(scaled, backend="megamoe", fullgraph=True)(
                x, weight, torch.tensor(6)
            )
            out.sum().backward(retain_graph=True)
            out.square().sum().backward()
            assert counters["inductor"]["fxgraph_cache_hit"] == hits


def penalty(rank):
    _, function = compiled(GroupedExperts, "fx")
    x = torch.randn(24, 16).bfloat16().requires_grad_()
    (gradient,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    with pytest.raises(SecondOrderGradient, match="create_graph"):
        gradient.square().sum().backward()


def test_gradients_of_gradients_are_one_error(mirrored_ranks):
    mirrored_ranks.run(penalty)
