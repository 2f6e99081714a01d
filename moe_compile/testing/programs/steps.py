"""Steps of a generated program, which go back once or several times, whole or in parts.

Contract
    Some layers run in parts and others whole where a program is compiled in pieces: each
    checkpointed layer by itself, or the layers on one side of a graph break. Gradients of
    parameters are added up from the first part on, of each backward by itself. A layer without
    information on sequences is divided by rows. A layer that returns more than rows cannot be
    divided: `MoreThanRows`.
    A step of all of it runs on one part of the batch after another, eagerly or by a backend of
    torch. Rows and gradients are those of gradient accumulation over the parts; gradients
    accumulated before are added last, as a compiled backward adds up parts by itself. The program
    is left as it was: its counts, integers and random numbers are those of one run of the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import nn

from passes.replay.batch_parts import part_sizes


@dataclass(frozen=True, slots=True)
class Step:
    """Values, gradient and input of one step, from which its backward starts."""

    values: list[Any]
    """The result, then the other returned values."""
    gradient: torch.Tensor
    """Gradient of the result; that of every other value is one."""
    x: torch.Tensor
    program: nn.Module


class GoBack(Protocol):
    """Goes back once, and adds gradients up in `.grad`."""

    def __call__(self, step: Step, *, retain: bool) -> None:
        """Go back; `retain` keeps the graph."""


def backwards_of(kind: str, number: int) -> tuple[GoBack, ...]:
    """Return the backwards of step `number` in a program whose `BACKWARD` is `kind`."""
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


Rows = Callable[[torch.Tensor], torch.Tensor]
"""A layer as a function of rows, its routing included."""


MOST_LAYERS: Final = 4
"""Number of layers up to which every subset is tried: fifteen runs."""


class MoreThanRows(Exception):
    """A layer returned values of the whole, a loss say."""


def some_layers(program: nn.Module) -> Iterator[frozenset[str]]:
    """Yield names of layers with experts, the same on every rank: all, then fewer if not many.

    A layer without experts runs whole where it is compiled by itself.
    """
    names = [name for name, layer in program.named_children() if hasattr(layer, "router")]
    if not names:
        return
    fewest = 1 if len(names) <= MOST_LAYERS else len(names)
    for number in range(len(names), fewest - 1, -1):
        yield from map(frozenset, itertools.combinations(names, number))


def layers_in_a_row(program: nn.Module) -> Iterator[frozenset[str]]:
    """Yield runs of consecutive layers, some with experts, that one graph may hold."""
    names = [name for name, _ in program.named_children()]
    for number in range(len(names), 0, -1):
        for first in range(len(names) - number + 1):
            some = frozenset(names[first : first + number])
            if any(hasattr(program.get_submodule(name), "router") for name in some):
                yield some


def divide_layers(program: nn.Module, names: frozenset[str], num_parts: int, per: int) -> None:
    """Let `program` run these layers in parts of the batch; a sequence has `per` rows."""
    for name, layer in program.named_children():
        if name in names:
            whole = partial(_rows, layer.forward, getattr(layer, "route", None))
            divided = partial(_divided, whole, [*layer.parameters()], num_parts, per)
            layer.__dict__.update(forward=divided, route=lambda _: None)


def _rows(forward: Callable[..., Any], route: Callable[..., Any] | None, x: Any) -> Any:
    y, extra = forward(x, route(x)) if route else forward(x)
    if extra:
        raise MoreThanRows
    return y


def _divided(
    whole: Rows,
    parameters: list[nn.Parameter],
    num_parts: int,
    per: int,
    x: torch.Tensor,
    _: Any = None,
) -> Any:
    sizes = [n * per for n in part_sizes(len(x) // per, num_parts)]
    return _OneAfterAnother.apply(whole, sizes, x, *parameters), []


class _OneAfterAnother(torch.autograd.Function):
    """Runs parts of `x`, and goes back from the first on.

    The parameters that `whole` reads are inputs as well: a backward adds what it asks for alone.
    """

    @staticmethod
    def forward(
        ctx: Any, whole: Rows, sizes: list[int], x: torch.Tensor, *parameters: nn.Parameter
    ) -> torch.Tensor:
        ctx.parameters = parameters
        with torch.enable_grad():
            ctx.parts = [part.detach().requires_grad_() for part in x.split(sizes)]
            ctx.results = [whole(part) for part in ctx.parts]
        return torch.cat([result.detach() for result in ctx.results])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        needed = ctx.needs_input_grad[3:]
        some = [p for p, is_needed in zip(ctx.parameters, needed, strict=True) if is_needed]
        totals: list[torch.Tensor | None] = [None] * len(some)
        of_x = []
        sizes = [len(result) for result in ctx.results]
        for part, result, its in zip(ctx.parts, ctx.results, gradient.split(sizes), strict=True):
            first, *fresh = torch.autograd.grad(
                result, [part, *some], its, retain_graph=True, allow_unused=True
            )
            of_x.append(first)
            totals = list(map(_plus, totals, fresh))
        found = iter(totals)
        of_parameters = [next(found) if is_needed else None for is_needed in needed]
        return None, None, torch.cat(of_x), *of_parameters


Gradients = dict[str, torch.Tensor | None]


def accumulated(
    program: nn.Module,
    function: Callable[..., Any],
    x: torch.Tensor,
    gradient: torch.Tensor,
    sizes: list[int],
    backwards: Sequence[GoBack],
) -> dict[str, Any]:
    """Return output, other rows of the results, and gradients once all `backwards` went through
    the same graphs, in turn. `function` runs the program.
    """
    x = x.detach().clone().requires_grad_(bool(backwards))
    total = _gradients_of(program, x)
    with _untouched(program), torch.set_grad_enabled(bool(backwards)):
        results = [function(part) for part in x.split(sizes)]
        for go_back in backwards:
            x.grad = None
            program.zero_grad()
            for (y, extra), part in zip(results, gradient.split(sizes), strict=True):
                go_back(Step([y, *extra], part, x, program), retain=True)
            fresh = _gradients_of(program, x)
            total = {name: _plus(kept, fresh[name]) for name, kept in total.items()}
    extras = enumerate(zip(*(extra for _, extra in results), strict=False))  # parts may note less
    rows = {f"extra value {i}": _joined(parts, sizes) for i, parts in extras}
    found = {name: joined for name, joined in rows.items() if joined is not None}
    return {"output": torch.cat([y.detach() for y, _ in results]), **found, **total}


def _joined(parts: Sequence[Any], sizes: list[int]) -> torch.Tensor | None:
    """Return rows of all parts, None for results that are not rows of floating-point numbers."""
    are_rows = all(
        isinstance(one, torch.Tensor) and one.is_floating_point() and one.dim() == 2
        for one in parts
    )
    if not are_rows or [len(one) for one in parts] != sizes:
        return None
    return torch.cat([one.detach() for one in parts])


def _gradients_of(program: nn.Module, x: torch.Tensor) -> Gradients:
    own = {f"gradient of {name}": p.grad for name, p in program.named_parameters()}
    return {"input gradient": x.grad, **own}


def _plus(kept: torch.Tensor | None, fresh: torch.Tensor | None) -> torch.Tensor | None:
    if kept is None or fresh is None:
        return fresh if kept is None else kept
    return kept + fresh


@contextmanager
def _untouched(program: nn.Module) -> Iterator[None]:
    """Restore buffers, integers, gradients and random state of `program` after the block."""
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
