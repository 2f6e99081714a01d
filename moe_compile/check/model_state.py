"""The state of a model in training: its tensors by name, and a copy that can be put back.

Contract
    After `Snapshot.restore` weights, buffers, optimizers, further state and random state are what
    they were, bit for bit, and no gradient is left. Weights and buffers are kept on the host, what
    an optimizer had already beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

WRAPPERS: Final = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Parts that activation checkpointing and `torch.compile` add to a parameter's name."""


def plain_name(name: str) -> str:
    """Return a parameter's name in the model as it is written."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; writes to it are writes to the tensor."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def gradients_of(parts: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's gradients of `parts` by name, from the last parameter of each to its first.

    Parts come last first too.
    """
    for part in reversed(parts):
        for name, parameter in reversed([*part.named_parameters()]):
            if parameter.grad is not None:
                yield f"gradient of {plain_name(name)}", local(parameter.grad)


def values_of(parts: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's parameters, buffers and random state by name."""
    for part in parts:
        yield from ((plain_name(n), local(p)) for n, p in part.named_parameters())
        yield from ((f"buffer {plain_name(n)}", local(b)) for n, b in part.named_buffers())
    yield "random state", torch.get_rng_state()
    if (device_random := _device_random()) is not None:
        yield "random state of the device", device_random


class Snapshot:
    """The state of a model in training at one time."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        others: Sequence[Any] = (),
    ) -> None:
        """Keep the state; `others` have `state_dict` and `load_state_dict`, as schedulers have."""
        self._parts, self._optimizers, self._others = parts, optimizers, others
        self._values = [value.to("cpu", copy=True) for value in self._tensors()]
        self._states = [
            ({p: _copied(state) for p, state in one.state.items()}, _settings(one))
            for one in optimizers
        ]
        self._dicts = [copy.deepcopy(one.state_dict()) for one in others]
        self._random = torch.get_rng_state()
        self._device_random = _device_random()

    def restore(self) -> None:
        """Put everything back."""
        for value, kept in zip(self._tensors(), self._values, strict=True):
            value.copy_(kept)
        for part in self._parts:
            part.zero_grad()
        for one, (states, settings) in zip(self._optimizers, self._states, strict=True):
            one.zero_grad()
            one.state.clear()
            one.state.update({p: _copied(state) for p, state in states.items()})
            for group, kept in zip(one.param_groups, settings, strict=True):
                group.update(_copied(kept))
        for one, state in zip(self._others, self._dicts, strict=True):
            one.load_state_dict(copy.deepcopy(state))
        torch.set_rng_state(self._random)
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random)

    def _tensors(self) -> Iterator[torch.Tensor]:
        for part in self._parts:
            yield from map(local, part.parameters())
            yield from map(local, part.buffers())


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for name, value in values.items()
    }


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = optimizer.param_groups
    return [_copied({k: v for k, v in group.items() if k != "params"}) for group in groups]


def _device_random() -> torch.Tensor | None:
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
