"""How a step of a generated program goes back: once, or several times through the same graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Step:
    """What a step goes back from, and to."""

    values: list[Any]
    """The result, then what was returned besides."""
    gradient: torch.Tensor
    """Of the result; that of every other value is one."""
    x: torch.Tensor
    program: nn.Module


class GoBack(Protocol):
    """Goes back once, and adds gradients up in `.grad`."""

    def __call__(self, step: Step, *, retain: bool) -> None:
        """Go back; `retain` keeps the graph."""


def backwards_of(kind: str, number: int) -> tuple[GoBack, ...]:
    """Return how step `number` goes back, of a program whose `BACKWARD` is `kind`."""
    if kind == "none" or (kind == "evaluated" and number % 2):
        return ()
    several: dict[str, tuple[GoBack, ...]] = {
        "twice": (_from_all, _from_all),
        "apart": (_from_result, _from_others),
        "grad_twice": (_to_input, _to_parameters),
    }
    return several.get(kind, (_from_all,))


def _from_all(step: Step, *, retain: bool) -> None:
    _backward(step, step.values, retain=retain)


def _from_result(step: Step, *, retain: bool) -> None:
    _backward(step, step.values[:1], retain=retain)


def _from_others(step: Step, *, retain: bool) -> None:
    _backward(step, step.values[1:], retain=retain)


def _to_input(step: Step, *, retain: bool) -> None:
    _add_gradients(step, [step.x], retain=retain)


def _to_parameters(step: Step, *, retain: bool) -> None:
    _add_gradients(step, [*step.program.parameters()], retain=retain)


def _backward(step: Step, values: Sequence[Any], *, retain: bool) -> None:
    if tensors := _with_graph(values):
        torch.autograd.backward(tensors, _gradients(step, tensors), retain_graph=retain)


def _add_gradients(step: Step, leaves: Sequence[torch.Tensor], *, retain: bool) -> None:
    tensors = _with_graph(step.values)
    found = torch.autograd.grad(
        tensors, leaves, _gradients(step, tensors), retain_graph=retain, allow_unused=True
    )
    for leaf, gradient in zip(leaves, found, strict=True):
        if gradient is not None:
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def _with_graph(values: Sequence[Any]) -> list[torch.Tensor]:
    return [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]


def _gradients(step: Step, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    result = step.values[0]
    return [step.gradient if t is result else torch.ones_like(t) for t in tensors]
