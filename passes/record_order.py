"""Record in the graph the order of its launches, and the predicted times of its schedule.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value; adds one host-side call at the head of a graph that launches anything.

The record travels inside the compiled graph, so a graph from a cache brings its own. It has the
name of the graph's timeline, which is too long for a text that every call hands over.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.fx as fx

from moe_compile.errors import ContractViolation
from moe_compile.graph.launch_order import collective_order, launch_numbers
from moe_compile.graph.query import is_launch, tensor_of
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState
from moe_compile.runtime.launch_records import RECORD_LAUNCHES
from moe_compile.schedule.timeline import keep_timeline
from passes.contract import Fact, GraphPass


@dataclass(frozen=True)
class RecordOrder(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "record_order"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    is_needed: ClassVar[bool] = True

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Emit the call before the first node that computes."""
        if not any(is_launch(node) for node in graph.nodes):
            detail = "the graph launches no collective"
            nothing = Verdict(candidate="graph", reason=Reason.ALREADY_DONE, detail=detail)
            return PassReport(pass_name=self.name, skipped=(nothing,))
        text = json.dumps(_record(graph, state), sort_keys=True)
        _emit(graph, text)
        return PassReport(pass_name=self.name, applied=("graph",))


def _record(graph: fx.Graph, state: CompileState) -> dict[str, Any]:
    order = collective_order(graph)
    measures = {**state.measures, **({} if state.is_backward else state.kept)}
    return {
        "site": state.site,
        "plan": state.plan_digest,
        "phase": "backward" if state.is_backward else "forward",
        "launches": {group: list(launches) for group, launches in sorted(order.items())},
        "numbers": launch_numbers(graph),
        "measures": {key: round(value, 3) for key, value in sorted(measures.items())},
        "timeline": keep_timeline(state.timeline, is_cached=state.config.codegen == "inductor"),
    }


def _emit(graph: fx.Graph, record: str) -> None:
    computing = (n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    first = next(computing)
    example = next((t for n in graph.nodes if (t := tensor_of(n)) is not None), None)
    mode = getattr(example, "fake_mode", None)
    if mode is None:
        raise ContractViolation(
            "record_order needs the fake tensors that torch's tracer attaches to a graph, and "
            "this graph has none"
        )
    settings = {"dtype": torch.uint8, "device": torch.device("cpu")}
    with graph.inserting_before(first):
        token = graph.call_function(torch.ops.aten.empty.memory_format, ([1],), settings)
        with mode:
            token.meta["val"] = torch.empty([1], dtype=torch.uint8, device="cpu")
        call = graph.call_function(RECORD_LAUNCHES, (token, record))
        call.meta["val"] = None
