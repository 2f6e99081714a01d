"""What the schedule of a traced graph predicts."""

from __future__ import annotations

import json
from typing import Any

import torch.fx as fx

from moe_compile.report.process_report import figures
from moe_compile.runtime.launch_records import RECORD_LAUNCHES


def predicted_measures(graph: fx.Graph) -> dict[str, float]:
    """Return times, microseconds, and bytes, from the record that every graph with launches has."""
    found = record_of(graph)
    return figures(found) if found else {}


def record_of(graph: fx.Graph) -> dict[str, Any]:
    """Return what a traced graph notes of itself when it runs; {} of a graph without launches."""
    for node in graph.find_nodes(op="call_function", target=RECORD_LAUNCHES):
        return dict(json.loads(str(node.args[1])))
    return {}
