"""One training step of a layer over the emulated link, timed.

Contract
    Ranks start together and the slowest counts. Clearing gradients, aligning clocks and comparing
    ranks lie outside the time. Page faults are counted: an allocator that returns memory to the
    system between steps makes fewer, larger tensors look slow.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.clocks import Clock
from benchmarks.emulated_link import EmulatedLink, LinkRate, Traffic

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One step as rank 0 saw it; the time is the slowest rank's."""

    elapsed_s: float
    traffic: Traffic
    page_faults: int


@dataclass(frozen=True, slots=True)
class Values:
    """What a step computed, to compare ways of computing it."""

    out: torch.Tensor
    input_grad: torch.Tensor
    weight_grads: tuple[torch.Tensor, ...]


class Stepper:
    """Runs steps of functions that share the parameters of one layer."""

    def __init__(self, layer: nn.Module, link: EmulatedLink, clock: Clock) -> None:
        """Make this rank's tokens and the gradient of its output, the same on every run."""
        case = layer.case
        generator = torch.Generator().manual_seed(100 + dist.get_rank())
        shape = (case.tokens, case.width)
        tokens, grad = (torch.randn(*shape, generator=generator).bfloat16() for _ in range(2))
        self._tokens, self._grad = tokens.requires_grad_(), grad
        self._parameters = tuple(layer.parameters())
        self._link, self._clock = link, clock

    def run(self, forward: Forward) -> torch.Tensor:
        """Make one untimed step, forward and backward; returns the output."""
        self._clear()
        out = forward(self._tokens)
        out.backward(self._grad)
        return out.detach()

    def values(self, forward: Forward) -> Values:
        """Make one step and return what it computed."""
        out = self.run(forward)
        weight_grads = tuple(p.grad for p in self._parameters)
        return Values(out.clone(), self._tokens.grad, weight_grads)

    def timed(self, forward: Forward, rate: LinkRate) -> Sample:
        """Make one step over a link of this rate."""
        self._clear()
        self._link.rate = rate
        self._link.traffic = traffic = Traffic()
        self._clock.align(largest(self._clock.now()))
        faults = _page_faults()
        began = self._clock.now()
        forward(self._tokens).backward(self._grad)
        elapsed_s = self._clock.now() - began
        faults = _page_faults() - faults
        return Sample(elapsed_s=largest(elapsed_s), traffic=traffic, page_faults=faults)

    def _clear(self) -> None:
        for tensor in (self._tokens, *self._parameters):
            tensor.grad = None


def largest(value: float) -> float:
    """Return the largest of all ranks' values; every rank must call."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def relative_error(values: Values, reference: Values) -> float:
    """Return the largest, over output, input and weight gradients, of |a - b| / |b| (2-norms)."""
    pairs = [
        (values.out, reference.out),
        (values.input_grad, reference.input_grad),
        *zip(values.weight_grads, reference.weight_grads, strict=True),
    ]
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
