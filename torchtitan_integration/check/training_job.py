"""One torchtitan job whose blocks run in several forms, from one state over the same batches.

Contract
    The trainer is torchtitan's, and its `train_step` is what runs. The layout is the recipe's, for
    forms that are not compiled too. Batches are fetched once, and each form gets them in the same
    order.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec
from torchtitan.tools.logging import init_logger

from moe_compile.check.forms import Forms
from moe_compile.check.model_state import Snapshot, gradients_of, values_of
from moe_compile.config import MegaMoEConfig
from moe_compile.errors import InvalidConfig
from torchtitan_integration.block_groups import OneAfterAnother
from torchtitan_integration.job_config import options_of, with_model_compiled
from torchtitan_integration.parallelize import Forward, parallelize


class TrainingJob:
    """A job's trainer, the forms of its blocks, and the state to which it can go back."""

    def __init__(
        self, words: Sequence[str], trainer_class: type[Any], *, num_steps: int, layers: int = 0
    ) -> None:
        """Make the trainer by torchtitan's command line `words`; `layers` is for fewer than all.

        Raises InvalidConfig where the data end before `num_steps`.
        """
        init_logger()
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(sys.stderr)  # a rank's log; the terminal has the check's lines
        self.forms = Forms()
        job = ConfigManager().parse_args(list(words))
        if job.experimental.custom_import:
            importlib.import_module(job.experimental.custom_import)
        spec = get_train_spec(job.model.name)
        spec.parallelize_fn = functools.partial(_lay_out, self.forms)
        if layers:
            cut(spec, job.model.flavor, layers)
        self.config: MegaMoEConfig = options_of(job)
        self._losses: list[torch.Tensor] = []
        self._trainer = _with_losses(trainer_class, self._losses)(job)
        self._log = _Log(self._trainer.metrics_processor)
        self._trainer.metrics_processor = self._log
        self._trainer.checkpointer.load(step=job.checkpoint.load_step)
        self._batches = self._fetched(num_steps)
        self._next = 0
        self._start = Snapshot(
            self._trainer.model_parts,
            self._trainer.optimizers.optimizers,
            self._trainer.lr_schedulers.schedulers,
        )
        self._counters = (self._trainer.step, self._trainer.ntokens_seen)
        self.step()  # pipelines look at shapes, and optimizers make their state
        self.restore()

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return torch.device(self._trainer.device)

    def restore(self) -> None:
        """Go back to the start: weights, optimizer, random state, data."""
        self._start.restore()
        self._trainer.step, self._trainer.ntokens_seen = self._counters
        self._next = 0

    def step(self, *, is_told: bool = False) -> None:
        """Train one step; with `is_told` its gradient norm is read, as in steps that are logged."""
        self._losses.clear()
        self._log.is_on = is_told
        self._trainer.step += 1
        self._trainer.train_step(self._replayed())

    def seen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what the last step left, by name: in the order in which it was computed.

        Gradients come from the last layer to the first.
        """
        for number, loss in enumerate(self._losses, 1):
            yield "loss" if len(self._losses) == 1 else f"loss of microbatch {number}", loss
        yield from self.gradients()
        yield "gradient norm", torch.tensor(self._log.norm, dtype=torch.float64)
        yield from values_of(self._trainer.model_parts)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradients of the last step, of parameters from the last layer to the first."""
        yield from gradients_of(self._trainer.model_parts)

    def losses(self) -> list[float]:
        """Return this rank's losses of the last step, by microbatch."""
        return [float(loss) for loss in self._losses]

    def close(self) -> None:
        """End the trainer."""
        self._trainer.close()

    def _fetched(self, num_steps: int) -> list[tuple[dict[str, Any], torch.Tensor]]:
        fetch = self._trainer.batch_generator(self._trainer.dataloader)
        number = num_steps * self._trainer.gradient_accumulation_steps
        try:
            return [next(fetch) for _ in range(number)]
        except DataloaderExhaustedError:
            raise InvalidConfig(
                f"the data set ends before {num_steps} steps; write a smaller --steps"
            ) from None

    def _replayed(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        while True:
            inputs, labels = self._batches[self._next % len(self._batches)]
            self._next += 1
            yield dict(inputs), labels  # train_step puts tensors of the device in their place


def _lay_out(forms: Forms, *given: Any) -> Any:
    """Lay out a model part with switches in place of compiled forwards."""
    part, dims, job = given

    def switch(forward: Forward, backend: str, options: Mapping[str, Any] | None) -> Forward:
        del backend
        return forms.switch(forward, options or {}, precise=without_checkpoints(forward))

    return parallelize(part, dims, with_model_compiled(job), switch, keeps_weights=True)


def without_checkpoints(forward: Forward) -> Forward:
    """Return the forward of a block, or of several, inside of activation checkpointing."""
    block = getattr(forward, "__self__", None)
    if isinstance(block, OneAfterAnother):
        return OneAfterAnother([without_checkpoints(one) for one in block.forwards]).forward
    wrapped = getattr(block, "_checkpoint_wrapped_module", None)
    return forward if wrapped is None else wrapped.forward


def cut(spec: TrainSpec, flavor: str, layers: int) -> None:
    """Have a flavor build its first `layers` layers; raises InvalidConfig for more than it has."""
    args = spec.model_args[flavor]
    if not 0 < layers <= args.n_layers:
        raise InvalidConfig(
            f"--layers is {layers}, and the model has {args.n_layers} layers; write 1 to "
            f"{args.n_layers}"
        )
    spec.model_args = {**spec.model_args, flavor: dataclasses.replace(args, n_layers=layers)}


def _with_losses(trainer_class: type[Any], losses: list[torch.Tensor]) -> type[Any]:
    """Return a trainer that adds each microbatch's loss on this rank to `losses`."""

    class Watched(trainer_class):
        def forward_backward_step(self, **given: Any) -> torch.Tensor:
            loss: torch.Tensor = super().forward_backward_step(**given)
            losses.append(loss.detach())  # what a second run of the step writes there is seen
            return loss

    return Watched


class _Log:
    """A job's metrics, of which one number is kept where they would be logged."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics
        self.is_on = False
        self.norm = 0.0

    def should_log(self, step: int) -> bool:
        del step
        return self.is_on

    def log(self, step: int, loss: float, most: float, grad_norm: float, **others: Any) -> None:
        del step, loss, most, others
        self.norm = grad_norm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metrics, name)
