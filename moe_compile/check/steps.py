"""Training steps in a form, from the same start over the same batches, and what they left.

Contract
    `Steps` is all that a check asks of a program that trains: whoever has these methods can be
    checked, a torchtitan job or a script.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from moe_compile.check.forms import EAGER, OURS, Form, Forms
from moe_compile.check.marks import Mark, mark_of, squares
from moe_compile.config import PREFIX
from moe_compile.testing.process_groups import be_deterministic


class Steps(Protocol):
    """A program that trains, and can go back to its start."""

    forms: Forms

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""

    def restore(self) -> None:
        """Go back to the start: weights, optimizer, random state, data."""

    def step(self, *, is_told: bool = False) -> None:
        """Train one step; with `is_told` all is kept that `seen` shows."""

    def seen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what the last step left, by name, in the order in which it was computed."""

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradients of the last step, by name."""

    def losses(self) -> list[float]:
        """Return this rank's losses of the last step."""


@dataclass(kw_only=True, slots=True)
class Trace:
    """What some steps of a form left on this rank."""

    marks: dict[str, Mark] = field(default_factory=dict)
    """Mark of everything, by step and name, in the order in which it was computed."""
    squares: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of each gradient of the first step: squares of its difference from the reference, and of the
    reference; {} without one."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Those of the first step, on the host, where they are kept."""
    losses: list[float] = field(default_factory=list)
    """Of the first step."""
    seconds: float = 0.0


def trace(
    job: Steps,
    form: Form,
    num_steps: int,
    *,
    reference: Mapping[str, torch.Tensor] | None = None,
    keeps: bool = False,
) -> Trace:
    """Train `num_steps` in a form from the start; with `keeps` gradients are kept."""
    found, began = Trace(), time.monotonic()
    job.restore()
    with job.forms.using(form), deterministic(keeps_bits(form)):
        for step in range(1, num_steps + 1):
            with _outputs_marked(job.forms, f"step {step}: ", found.marks):
                job.step(is_told=True)
            found.marks |= {f"step {step}: {name}": mark_of(x) for name, x in job.seen()}
            if step == 1:
                found.losses = job.losses()
                _look_at_gradients(job, found, reference, keeps=keeps)
    found.seconds = time.monotonic() - began
    return found


def keeps_bits(form: Form) -> bool:
    """Whether a form runs torch's operators one by one."""
    return form.backend == EAGER or form.options.get(PREFIX + "codegen") == "fx"


def is_ours(form: Form) -> bool:
    """Whether megamoe compiles a form."""
    return form.backend == OURS


@contextlib.contextmanager
def deterministic(is_so: bool) -> Iterator[None]:
    """Have torch's deterministic algorithms in use meanwhile, or as it was."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if is_so:
        be_deterministic()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


@contextlib.contextmanager
def _outputs_marked(forms: Forms, step: str, marks: dict[str, Mark]) -> Iterator[None]:
    calls = dict[int, int]()

    def watch(number: int, result: Any) -> None:
        calls[number] = calls.get(number, 0) + 1
        again = f", call {calls[number]}" if calls[number] > 1 else ""
        if isinstance(result, torch.Tensor):
            marks[f"{step}output of block {number + 1}{again}"] = mark_of(result)

    forms.watcher = watch
    try:
        yield
    finally:
        forms.watcher = None


def _look_at_gradients(
    job: Steps, found: Trace, reference: Mapping[str, torch.Tensor] | None, *, keeps: bool
) -> None:
    for name, gradient in job.gradients():
        if reference is not None and name in reference:
            found.squares[name] = squares(gradient, reference[name])
        if keeps:
            found.gradients[name] = gradient.to("cpu", copy=True)
