"""One MoE layer on one device: its steps, its variants, and the code Inductor makes of it.

Contract
    All variants share the layer's parameters, tokens and output gradient.
    Clearing gradients lies outside the time of a step; the host read of split sizes within.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest import mock

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch._inductor.graph import GraphLowering

from benchmarks.gpu.exact_layer import Tensors
from benchmarks.gpu.sizes import OVERLAP_SCHEDULING, SMOKE_OURS
from benchmarks.link.cases import Case
from benchmarks.link.layer import MoELayer
from benchmarks.link.variants import VARIANTS, Variant
from moe_compile.backend import megamoe
from moe_compile.hardware.measure import elapsed_s, synchronize
from moe_compile.testing.wrapper_order import event_letters, products_under, wrapper_events

Forward = Callable[[torch.Tensor], torch.Tensor]

MAX_GRAPHS: Final = 64
"""All variants share one `forward`; Dynamo would stop at 8."""
ATEN_OVERLAP: Final = "aten_distributed_optimizations.enable_overlap_scheduling"

GPU_VARIANTS: Final = {
    **{variant.name: variant for variant in VARIANTS},
    SMOKE_OURS: Variant(
        name=SMOKE_OURS,
        backend="megamoe",
        options={"megamoe.chunks": 2, "megamoe.codegen": "fx"},
    ),
    OVERLAP_SCHEDULING: Variant(name=OVERLAP_SCHEDULING, options={ATEN_OVERLAP: True}),
}


def is_known(variant: Variant) -> bool:
    """Return whether this torch has Inductor's options of the variant; ours are always known."""
    known = inductor_config.get_config_copy()
    return all(key in known or key.startswith("megamoe.") for key in variant.options)


def start_compiler() -> None:
    """Make torch ready for many variants of one layer, with megamoe installed or not."""
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    if "megamoe" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(compiler_fn=megamoe, name="megamoe")


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeOrder:
    """In which order one generated wrapper does things."""

    letters: str
    """Launches, waits, matrix products (wrapper_order's letters)."""
    products_under: tuple[int, ...]
    """Matrix products between each launch and the wait for it."""


def order_of(code: str) -> CodeOrder:
    """Return the order of a wrapper's text."""
    events = wrapper_events(code)
    return CodeOrder(letters=event_letters(events), products_under=products_under(events))


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """One variant, compiled, and what its first step was like."""

    forward: Forward
    compile_s: float
    """Of the first step, forward and backward, kernels perhaps from the cache on disk."""
    orders: tuple[CodeOrder, ...]
    """Of forward and backward."""
    codes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one step."""

    seconds: float
    """From its first kernel to its last."""
    host_s: float
    """Until the host had launched all of it; near `seconds`, launching is what takes the time."""


class LayerStep:
    """Steps of the layer of `case` over `group`."""

    def __init__(self, case: Case, group: dist.ProcessGroup, device: str) -> None:
        """Make layer, tokens and output gradient; the same in every process."""
        self.device = device
        self.layer = MoELayer(case, group).to(device)
        generator = torch.Generator().manual_seed(100)
        shape = (case.tokens, case.width)
        tokens, grad = (torch.randn(*shape, generator=generator).bfloat16() for _ in range(2))
        self.tokens, self.grad = tokens.to(device).requires_grad_(), grad.to(device)

    def run(self, forward: Forward) -> torch.Tensor:
        """Make one step; returns the output."""
        self.clear()
        return self._step(forward)

    def timed(self, forward: Forward) -> StepTime:
        """Make one step and time it."""
        self.clear()
        synchronize(self.device)
        host_s: list[float] = []

        def step() -> None:
            began = time.perf_counter()
            self._step(forward)
            host_s.append(time.perf_counter() - began)

        seconds = elapsed_s(self.device, step)
        return StepTime(seconds=seconds, host_s=host_s[0])

    def results(self, forward: Forward) -> Tensors:
        """Return what one step computes, in its own precision."""
        out = self.run(forward).detach()
        grads = {name: parameter.grad for name, parameter in self.layer.named_parameters()}
        return {"out": out, "input_grad": self.tokens.grad, **grads}

    def compile(self, variant: Variant, hardware: str | Path) -> Compiled:
        """Return the variant, compiled by one step; `hardware` is the profile megamoe is told.

        Whole graphs are compiled anew even where a cache has them: only then is there code to read.
        """
        forward = variant.build(self.layer, Path(hardware))
        codes: list[str] = []
        began = time.monotonic()
        with (
            mock.patch.object(GraphLowering, "save_output_code", codes.append),
            inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
            torch._functorch.config.patch(
                enable_autograd_cache=False, force_non_lazy_backward_lowering=True
            ),
        ):
            self.run(forward)
            synchronize(self.device)
        return Compiled(
            forward=forward,
            compile_s=time.monotonic() - began,
            orders=tuple(map(order_of, codes)),
            codes=tuple(codes),
        )

    def clear(self) -> None:
        """Forget all gradients."""
        for tensor in (self.tokens, *self.layer.parameters()):
            tensor.grad = None

    def _step(self, forward: Forward) -> torch.Tensor:
        out = forward(self.tokens)
        out.backward(self.grad)
        return out
