"""A step of a generated program without host reads, run again where rows had no room on some rank.

Contract
    As a trainer does it (`moe_compile.runtime.rerun`): all ranks agree after the backward, and
    before weights move. What the first run wrote is put back: the input, buffers, integers kept in
    modules, gradients and the state of the random generator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from moe_compile.runtime.rerun import RERUN

T = TypeVar("T")


class Noted(NamedTuple):
    """What one step found about the room for its rows."""

    on_this_rank: bool
    """Whether rows of this rank had no room."""
    runs_again: bool
    """Whether the ranks agreed to run it again."""


@contextlib.contextmanager
def served() -> Iterator[None]:
    """Compile programs without reads: steps that this file runs can run again."""
    RERUN.begin(is_served=True)
    try:
        yield
    finally:
        RERUN.begin(is_served=False)


def run_step(program: nn.Module, x: torch.Tensor, run: Callable[[], T], noted: list[Noted]) -> T:
    """Run forward and backward of a step, twice where need be; add what was noted to `noted`."""
    before = _State.of(program, x)
    with RERUN.reading_nothing():
        done = run()
    RERUN.add(note := RERUN.taken())
    noted.append(Noted(note is not None and bool(note[0]), RERUN.agreed(x.device)))
    if noted[-1].runs_again:
        before.put_back()
        with RERUN.reading():
            done = run()
    return done


def against(noted: list[list[Noted]]) -> list[str]:
    """Return what is wrong with the steps that the ranks ran again, or did not."""
    return [
        f"step {number}: ranks noted and agreed {[tuple(one) for one in of_ranks]}"
        for number, of_ranks in enumerate(zip(*noted, strict=False))
        if {one.runs_again for one in of_ranks} != {any(one.on_this_rank for one in of_ranks)}
    ]


@dataclass(frozen=True, slots=True)
class _State:
    """What a step may write before weights move."""

    program: nn.Module
    tensors: list[tuple[torch.Tensor, torch.Tensor]]
    gradients: list[tuple[torch.Tensor, torch.Tensor | None]]
    integers: list[tuple[nn.Module, dict[str, Any]]]
    random: torch.Tensor
    random_of_gpu: torch.Tensor | None

    @staticmethod
    def of(program: nn.Module, x: torch.Tensor) -> _State:
        with torch.no_grad():
            tensors = [(t, t.detach().clone()) for t in (x, *program.buffers())]
            leaves = [x, *program.parameters()]
            grads = [(p, None if p.grad is None else p.grad.clone()) for p in leaves]
        kept = [
            (module, {name: value for name, value in vars(module).items() if type(value) is int})
            for module in program.modules()
        ]
        of_gpu = torch.cuda.get_rng_state(x.device) if x.is_cuda else None
        return _State(program, tensors, grads, kept, torch.get_rng_state(), of_gpu)

    def put_back(self) -> None:
        with torch.no_grad():
            for tensor, before in self.tensors:
                tensor.copy_(before)
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        for module, integers in self.integers:
            vars(module).update(integers)
        torch.set_rng_state(self.random)
        if self.random_of_gpu is not None:
            torch.cuda.set_rng_state(self.random_of_gpu, self.tensors[0][0].device)
