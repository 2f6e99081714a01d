"""Have the wait for each collective measure how long it takes.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value, the order of nodes, and all that Inductor does with a wait: the kernel
              that it calls there is ours, which calls torch's.

    wait_tensor(x)  ->  measured_wait(x, "site|phase|node that launches")

Of several waits for one collective the first is measured: nothing is left for the others. The pass
runs after the order is planned and checked. Every question on a node takes the new wait for a
wait (`graph/query.py`).

Inductor has a node of its own for waits, by which its scheduler knows what is in flight. It is
made for our operator too, by a lowering; where torch lacks the means, or the wrapper is C++, whose
wait is a fixed function, the waits stay torch's.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch._inductor.config as inductor_config
import torch.fx as fx

from moe_compile.graph.edit import call_otherwise
from moe_compile.graph.precedence import awaited
from moe_compile.graph.query import is_wait
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState
from moe_compile.runtime.measured_waits import MEASURED_WAIT, name_of
from passes.contract import Fact, GraphPass

OPTION: Final = "measure_waits"


@dataclass(frozen=True)
class MeasureWaits(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "measure_waits"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    after: ClassVar[frozenset[str]] = frozenset({"record_order"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Replace the operator of the first wait for each collective."""
        if not state.config.measure_waits:
            return PassReport(pass_name=self.name)
        if detail := _what_lacks(state):
            why = Reason.NO_MEANS
            left = Verdict(candidate="graph", reason=why, detail=detail, option=OPTION)
            return PassReport(pass_name=self.name, skipped=(left,))
        phase = "backward" if state.is_backward else "forward"
        waits = _first_waits(graph)
        for launch, wait in waits.items():
            call_otherwise(
                wait, MEASURED_WAIT, wait.args[0], name_of(state.site, phase, launch.name)
            )
        return PassReport(pass_name=self.name, applied=tuple(launch.name for launch in waits))


def _first_waits(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return launch -> its first wait; of what another graph launched, the wait itself for both."""
    waits: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if is_wait(node):
            waits.setdefault(awaited(node) or node, node)
    return waits


def _what_lacks(state: CompileState) -> str:
    """Return what keeps Inductor from writing our waits, "" where nothing does."""
    if state.config.codegen != "inductor":
        return ""
    if inductor_config.cpp_wrapper:
        return "Inductor's cpp_wrapper is on"
    if write_measured_waits():
        return ""
    return (
        "Inductor's node of a wait has a form that megamoe does not know, in this version of torch"
    )


@functools.cache
def write_measured_waits() -> bool:
    """Have Inductor write our waits as it writes torch's; return whether this torch has the means.

    `create_wait` of Inductor's node is repeated with one more argument: the name.
    """
    try:
        ir = importlib.import_module("torch._inductor.ir")
        lowering = importlib.import_module("torch._inductor.lowering")
        virtualized = importlib.import_module("torch._inductor.virtualized")
        kernel: Any = ir._WaitKernel
        keep_strides = lowering.constrain_to_fx_strides
    except (ImportError, AttributeError):
        return False

    def lower(tensor: Any, collective: str) -> Any:
        nothing = ir.NoneLayout(device=tensor.get_device())
        with virtualized.V.graph.fake_mode:
            processed = kernel.process_kernel(MEASURED_WAIT, tensor, collective)
        _, tensors, others, unflatten, _ = processed
        wait = kernel(nothing, MEASURED_WAIT, tensors, others, unflatten)
        wait.alias_names.clear()  # as torch's wait, whose schema does not name its result
        wait.mutation_outputs.append(ir.MutationOutput(nothing, tensor, wait))
        return tensor

    lowering.add_layout_constraint(MEASURED_WAIT, keep_strides)
    lowering.register_lowering(MEASURED_WAIT, type_promotion_kind=None)(lower)
    return True
