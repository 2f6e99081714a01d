"""What a subject computes, step by step, and whether two runs computed the same.

Contract
    Random numbers start alike in every run. What is compared, bit for bit: outputs, gradients of
    inputs and of parameters, buffers, after every step, and the random state after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.utils._pytree as pytree

from benchmarks.acceptance.subject import Call, Subject

SEED: Final = 7

Tensors = dict[str, torch.Tensor]


def run_steps(
    subject: Subject, function: Callable[..., Any], after_first: Callable[[], None] = lambda: None
) -> Tensors:
    """Call `function`, the subject's model or it compiled, with every call of the subject."""
    torch.manual_seed(SEED)
    found: Tensors = {}
    for step, call in enumerate(subject.calls):
        found |= {f"step {step}: {name}": x for name, x in _one_step(subject, function, call)}
        if step == 0:
            after_first()
    return found | {"random state": torch.get_rng_state()}


def _one_step(
    subject: Subject, function: Callable[..., Any], call: Call
) -> Iterator[tuple[str, torch.Tensor]]:
    subject.model.zero_grad()
    args, kwargs = pytree.tree_map_only(torch.Tensor, _leaf, (call.args, dict(call.kwargs)))
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if _has_gradient(x)]
    outputs = list(filter(torch.is_tensor, pytree.tree_leaves(_plain(function(*args, **kwargs)))))
    generator = torch.Generator().manual_seed(SEED)
    sources = [x for x in outputs if x.requires_grad]
    torch.autograd.backward(sources, [_weights(x, generator) for x in sources])
    for i, x in enumerate(outputs):
        yield f"output {i}", x.detach().clone()
    for i, x in enumerate(inputs):
        yield f"gradient of input {i}", _gradient(x)
    for name, x in subject.model.named_parameters():
        yield f"gradient of {name}", _gradient(x)
    for name, x in subject.model.named_buffers():
        yield f"buffer {name}", x.detach().clone()


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_(x.is_floating_point())


def _has_gradient(x: Any) -> bool:
    return torch.is_tensor(x) and x.requires_grad


def _plain(output: Any) -> Any:
    """Return a model's output in classes that torch's pytree knows."""
    return dict(output) if isinstance(output, dict) else output


def _weights(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(x.shape, generator=generator).to(x.dtype)


def _gradient(x: torch.Tensor) -> torch.Tensor:
    gradient = torch.zeros_like(x) if x.grad is None else x.grad
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local.detach().clone()


def differences(found: Tensors, expected: Tensors) -> dict[str, float]:
    """Return by how much tensors differ, relative to the largest value; {} where none does."""
    alone = dict.fromkeys(found.keys() ^ expected.keys(), float("inf"))
    both = [name for name in expected if name in found]
    return alone | {
        name: _error(found[name], expected[name])
        for name in both
        if not _is_equal(found[name], expected[name])
    }


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all values are; those that are no number are alike."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*map(_numbers, (a, b)))


def _numbers(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(nan=12345.678) if x.is_floating_point() else x


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    largest = b.double().abs().max().clamp(min=1e-30)
    return float((a.double() - b.double()).abs().max() / largest)
