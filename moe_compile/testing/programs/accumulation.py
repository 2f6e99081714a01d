"""A step of a generated program eagerly on one part of its batch after another.

Contract
    Output and gradients are those of gradient accumulation over the parts; what was accumulated
    before is added last, as a compiled backward adds up parts by itself. The program is left as it
    was: its counts, integers and random numbers are those of one run of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moe_compile.testing.programs.backwards import GoBack, Step

Gradients = dict[str, torch.Tensor | None]


def accumulated(
    program: nn.Module,
    x: torch.Tensor,
    gradient: torch.Tensor,
    sizes: list[int],
    backwards: Sequence[GoBack],
) -> dict[str, Any]:
    """Return output and gradients once all `backwards` went through the same graphs, in turn."""
    x = x.detach().clone().requires_grad_(bool(backwards))
    total = _gradients(program, x)
    with _untouched(program), torch.set_grad_enabled(bool(backwards)):
        results = [program(part) for part in x.split(sizes)]
        for go_back in backwards:
            x.grad = None
            program.zero_grad()
            for (y, extra), part in zip(results, gradient.split(sizes), strict=True):
                go_back(Step([y, *extra], part, x, program), retain=True)
            fresh = _gradients(program, x)
            total = {name: _plus(kept, fresh[name]) for name, kept in total.items()}
    return {"output": torch.cat([y.detach() for y, _ in results]), **total}


def _gradients(program: nn.Module, x: torch.Tensor) -> Gradients:
    own = {f"gradient of {name}": p.grad for name, p in program.named_parameters()}
    return {"input gradient": x.grad, **own}


def _plus(kept: torch.Tensor | None, fresh: torch.Tensor | None) -> torch.Tensor | None:
    if kept is None or fresh is None:
        return fresh if kept is None else kept
    return kept + fresh


@contextmanager
def _untouched(program: nn.Module) -> Iterator[None]:
    """Put back what running `program` changes: buffers, integers, gradients, random numbers."""
    buffers = {name: buffer.clone() for name, buffer in program.named_buffers()}
    gradients = {p: p.grad for p in program.parameters()}
    integers = [(vars(m), k, v) for m in program.modules() for k, v in vars(m).items()]
    integers = [(own, k, v) for own, k, v in integers if type(v) is int]
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    with torch.no_grad():
        for name, buffer in program.named_buffers():
            buffer.copy_(buffers[name])
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    for own, name, value in integers:
        own[name] = value
