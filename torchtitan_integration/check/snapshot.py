"""The state of a torchtitan trainer, kept so that it can be had again.

Contract
    After `restore` weights, buffers, optimizers, learning rates, random state and the trainer's
    counters are what they were, bit for bit. Weights and buffers are kept on the host, what an
    optimizer had already beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; writes to it are writes to the tensor."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def tensors_of(parts: list[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield this rank's parts of all parameters and buffers."""
    for part in parts:
        yield from map(local, part.parameters())
        yield from map(local, part.buffers())


class Snapshot:
    """A trainer's state at one time."""

    def __init__(self, trainer: Any) -> None:
        """Keep the state of `trainer`, a torchtitan Trainer."""
        self._trainer = trainer
        self._values = [value.to("cpu", copy=True) for value in tensors_of(trainer.model_parts)]
        self._optimizers = [
            ({p: _copied(state) for p, state in one.state.items()}, _settings(one))
            for one in trainer.optimizers.optimizers
        ]
        schedulers = trainer.lr_schedulers.schedulers
        self._schedulers = [copy.deepcopy(one.state_dict()) for one in schedulers]
        self._counters = (trainer.step, trainer.ntokens_seen)
        self._random = torch.get_rng_state()
        self._device_random = _device_random()

    def restore(self) -> None:
        """Put everything back."""
        trainer = self._trainer
        for value, kept in zip(tensors_of(trainer.model_parts), self._values, strict=True):
            value.copy_(kept)
        trainer.optimizers.zero_grad()
        for one, (states, settings) in zip(
            trainer.optimizers.optimizers, self._optimizers, strict=True
        ):
            one.state.clear()
            one.state.update({p: _copied(state) for p, state in states.items()})
            for group, kept in zip(one.param_groups, settings, strict=True):
                group.update(_copied(kept))
        for one, state in zip(trainer.lr_schedulers.schedulers, self._schedulers, strict=True):
            one.load_state_dict(copy.deepcopy(state))
        trainer.step, trainer.ntokens_seen = self._counters
        torch.set_rng_state(self._random)
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random)


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
