"""A layer compiled by megamoe and run on an emulated device: once per profile, traced once.

Contract
    The passes are all that `torch.compile(backend="megamoe")` runs, on the same graphs; those that
    ask for the hardware run anew for every profile, on copies of AOTAutograd's graphs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from benchmarks.link.charged_graph import ChargedGraph
from benchmarks.link.clocks import ChargedClock
from moe_compile.backend import rewrite
from moe_compile.codegen import AFTER_PARTITION, partition_with_passes, run_on_aot_graph
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import HardwareProfile
from moe_compile.plan.state import CompileState


@dataclass(slots=True)
class EmulatedDevice:
    """A backend of torch.compile; what it compiles runs at the rates of `hardware`.

    `hardware` may be changed between steps.
    """

    config: MegaMoEConfig
    clock: ChargedClock
    hardware: HardwareProfile
    num_chunks: list[int] = field(default_factory=list)
    """Of every region compiled."""
    graphs: list[_Graph] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a Dynamo graph."""
        state, compilation = rewrite(gm, self.config)
        self.num_chunks += [region.num_chunks for region in compilation.regions]
        states: dict[HardwareProfile, CompileState] = {}

        def keep(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            del inputs
            self.graphs.append(_Graph(self, module, state, states))
            return make_boxed_func(self.graphs[-1].run)

        partition = partition_with_passes(state)
        aot = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
        return aot(gm, list(example_inputs))  # type: ignore[no-any-return]

    @property
    def computed_us(self) -> float:
        """Return what the last step charged for computing, without waits."""
        return sum(graph.computed_us for graph in self.graphs)


@dataclass(slots=True)
class _Graph:
    """A forward or a backward graph, before the passes that know the hardware."""

    device: EmulatedDevice
    module: fx.GraphModule
    state: CompileState
    states: dict[HardwareProfile, CompileState]
    """What forward and backward share, for every hardware so far."""
    scheduled: dict[HardwareProfile, ChargedGraph] = field(default_factory=dict)
    computed_us: float = 0.0

    def run(self, *inputs: Any) -> Any:
        hardware = self.device.hardware
        if hardware not in self.scheduled:
            self.scheduled[hardware] = self._schedule(hardware)
        graph = self.scheduled[hardware]
        outputs = graph.run(*inputs)
        self.computed_us = graph.computed_us
        return outputs

    def _schedule(self, hardware: HardwareProfile) -> ChargedGraph:
        module = fx.GraphModule(self.module, copy.deepcopy(self.module.graph))
        if hardware not in self.states:
            fresh: dict[str, Any] = {"measures": {}, "nominal_sizes": {}}
            self.states[hardware] = dataclasses.replace(self.state, hardware=hardware, **fresh)
        state = self.states[hardware]
        for level in AFTER_PARTITION:
            run_on_aot_graph(level, module.graph, state)
        module.recompile()
        return ChargedGraph(module, hardware, self.device.clock)


def compile_for(module: torch.nn.Module, device: EmulatedDevice) -> Callable[..., torch.Tensor]:
    """Return `module` compiled for an emulated device; it compiles at its first call."""
    torch._dynamo.reset()
    return torch.compile(module, backend=device, fullgraph=True)  # type: ignore[no-any-return]
