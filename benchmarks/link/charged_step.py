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
from moe_compile.journal.entries import Journal
from moe_compile.plan.state import CompileState
from moe_compile.report.compilations import Compilation


@dataclass(slots=True)
class EmulatedDevice:
    """A backend of torch.compile; what it compiles runs at the rates of `hardware`.

    `hardware` may be changed between steps.
    """

    config: MegaMoEConfig
    clock: ChargedClock
    hardware: HardwareProfile
    compilations: list[Compilation] = field(default_factory=list)
    graphs: list[_Graph] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a Dynamo graph."""
        state, compilation = rewrite(gm, self.config)
        self.compilations.append(compilation)
        states: dict[HardwareProfile, CompileState] = {}

        def keep(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            del inputs
            self.graphs.append(_Graph(self, module, state, states))
            return make_boxed_func(self.graphs[-1].run)

        partition = partition_with_passes(state)
        aot = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
        return aot(gm, list(example_inputs))  # type: ignore[no-any-return]

    def charged(self, module: fx.GraphModule, hardware: HardwareProfile) -> ChargedGraph:
        """Return what runs a scheduled graph on this rank."""
        return ChargedGraph(module, hardware, self.clock)

    def schedule(self) -> list[dict[str, Any]]:
        """Schedule all graphs for `hardware`, unless done; return what their passes report."""
        for graph in self.graphs:
            graph.scheduled_for(self.hardware)
        journals = {id(one): one for g in self.graphs for one in (g.states[self.hardware].journal,)}
        return [record for journal in journals.values() for record in journal.as_data()]

    @property
    def num_chunks(self) -> list[int]:
        """Return the number of chunks of every region compiled."""
        return [region.num_chunks for one in self.compilations for region in one.regions]

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
    scheduled: dict[HardwareProfile, fx.GraphModule] = field(default_factory=dict)
    computed_us: float = 0.0

    def run(self, *inputs: Any) -> Any:
        hardware = self.device.hardware
        graph = self.device.charged(self.scheduled_for(hardware), hardware)
        outputs = graph.run(*inputs)
        self.computed_us = graph.computed_us
        return outputs

    def scheduled_for(self, hardware: HardwareProfile) -> fx.GraphModule:
        """Return the graph after the passes that know the hardware, which run once for each."""
        if hardware not in self.scheduled:
            self.scheduled[hardware] = self._schedule(hardware)
        return self.scheduled[hardware]

    def _schedule(self, hardware: HardwareProfile) -> fx.GraphModule:
        module = fx.GraphModule(self.module, copy.deepcopy(self.module.graph))
        if hardware not in self.states:
            fresh: dict[str, Any] = {"measures": {}, "nominal_sizes": {}, "journal": Journal()}
            self.states[hardware] = dataclasses.replace(self.state, hardware=hardware, **fresh)
        state = self.states[hardware]
        for level in AFTER_PARTITION:
            run_on_aot_graph(level, module.graph, state)
        module.recompile()
        return module


def compile_for(module: torch.nn.Module, device: EmulatedDevice) -> Callable[..., torch.Tensor]:
    """Return `module` compiled for an emulated device; it compiles at its first call."""
    torch._dynamo.reset()
    return torch.compile(module, backend=device, fullgraph=True)  # type: ignore[no-any-return]
