"""Check that a layer compiled by megamoe equals the eager layer bit for bit.

Contract
    To be called on every rank of a group at once. Layers and inputs are moved to the device of the
    rank. Outputs, the input's gradient, every
    parameter's gradient and every buffer are compared by `torch.equal`, after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from moe_compile.testing.process_groups import rank_device


def differing_tensors(
    build: Callable[[], nn.Module],
    inputs: list[tuple[torch.Tensor, torch.Tensor]],
    options: Mapping[str, Any],
    reference: Callable[[], nn.Module] | None = None,
) -> list[str]:
    """Return the names of the tensors that differ between `build()` eager and compiled.

    `build` is called twice and must give equal layers. `inputs` holds one pair per step: the
    layer's input and the gradient of its output. `options` are those of
    `torch.compile(..., backend="megamoe")`; `codegen` is "fx" unless they name another, since
    Inductor rounds differently from eager. `reference` builds the layer that runs eagerly, where
    a lossy option makes `build()` itself no reference. Names come as `step 0: output`.
    """
    device = rank_device()
    eager, other = (reference or build)().to(device), build().to(device)
    settings = {"megamoe.codegen": "fx", **options}
    compiled = torch.compile(other, backend="megamoe", fullgraph=True, options=settings)
    found = []
    for step, pair in enumerate(inputs):
        x, gradient = (tensor.to(device) for tensor in pair)
        expected = dict(_run(eager, eager, x, gradient))
        for name, tensor in _run(compiled, other, x, gradient):
            if not torch.equal(tensor, expected[name]):
                error = (tensor.double() - expected[name].double()).abs().max().item()
                found.append(f"step {step}: {name} differs by up to {error:.3g}")
    return found


def _run(
    function: Callable[[torch.Tensor], torch.Tensor],
    layer: nn.Module,
    x: torch.Tensor,
    gradient: torch.Tensor,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Run one step and yield its results by name."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    output = function(x)
    output.backward(gradient)
    yield "output", output.detach()
    yield "input gradient", _gradient(x)
    for name, parameter in layer.named_parameters():
        yield f"gradient of {name}", _gradient(parameter).clone()
    for name, buffer in layer.named_buffers():
        yield f"buffer {name}", buffer.clone()


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
