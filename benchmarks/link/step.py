"""One training step over the emulated link, timed.

Contract
    Ranks start together and the slowest counts. Clearing gradients, aligning clocks and comparing
    ranks lie outside the time. Page faults are counted: an allocator that returns memory to the
    system between steps makes fewer, larger tensors look slow.
"""

from __future__ import annotations

import itertools
import resource
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.link.clocks import Clock
from benchmarks.link.emulated_link import EmulatedLink
from benchmarks.link.link_model import LinkRate, Traffic
from benchmarks.link.subjects import Subject, Values

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One step as rank 0 saw it; the time is the slowest rank's."""

    elapsed_s: float
    traffic: Traffic
    page_faults: int
    forward_s: float = 0.0
    """Of its time, the forward."""
    forward_exchanges: int = 0


class Stepper:
    """Runs steps of functions that share the parameters of one module."""

    def __init__(self, subject: Subject, link: EmulatedLink, clock: Clock) -> None:
        """Time on `clock` what `subject` exchanges over `link`."""
        self.module = subject.module
        self._tokens, self._grad = subject.tokens, subject.grad
        self._parameters = tuple(subject.module.parameters())
        self._is_part = [name in subject.replicated for name, _ in self.module.named_parameters()]
        self._wire, self._clock = link.wire, clock
        self.expected = subject.expected or self.values(self.module)

    def run(self, forward: Forward) -> torch.Tensor:
        """Make one untimed step, forward and backward; returns the output."""
        self._clear()
        out = forward(self._tokens)
        out.backward(self._grad)
        return out.detach()

    def values(self, forward: Forward) -> Values:
        """Make one step and return what it computed; every rank must call."""
        out = self.run(forward)
        grads = [p.grad.clone() for p in self._parameters]
        for grad in itertools.compress(grads, self._is_part):
            dist.all_reduce(grad)
        return Values(out.clone(), self._tokens.grad, tuple(grads))

    def timed(self, forward: Forward, rate: LinkRate) -> Sample:
        """Make one step over a link of this rate."""
        self._clear()
        self._wire.rate = rate
        self._wire.traffic = traffic = Traffic()
        self._clock.align(largest(self._clock.now()))
        faults = _page_faults()
        began = self._clock.now()
        out = forward(self._tokens)
        forward_s, forward_exchanges = self._clock.now() - began, traffic.num_exchanges
        out.backward(self._grad)
        elapsed_s = self._clock.now() - began
        faults = _page_faults() - faults
        return Sample(
            elapsed_s=largest(elapsed_s),
            traffic=traffic,
            page_faults=faults,
            forward_s=largest(forward_s),
            forward_exchanges=forward_exchanges,
        )

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
