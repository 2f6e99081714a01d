"""What one rank does for a case: torch's own backend as the measure, and megamoe's.

Contract
    What earlier calls compiled in the process is forgotten. The measure is plain `aot_eager`, with
    Dynamo's settings as torch has them: megamoe's import changes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch._dynamo
import torch.fx as fx
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from benchmarks.acceptance.cases import find_case
from benchmarks.acceptance.compare import differences, run_steps
from moe_compile.graph.query import source_place
from moe_compile.graph.torch_calls import is_open_sort, make_stable
from moe_compile.report.process_report import REPORT
from moe_compile.testing.rank_pool import forget_compiled

STABLE: Final = "stable sorts"


def keep_measure(rank: int, name: str, backend: str, folder: str) -> None:
    """Run by `backend` of torch, or eagerly for "none", and keep what was computed.

    "stable sorts" is `aot_eager` where torch's sorts outside of functions that dispatch are stable.
    """
    _forget()
    subject = find_case(name).build(rank)
    used = _with_stable_sorts if backend == STABLE else backend
    compiled = subject.model if backend == "none" else torch.compile(subject.model, backend=used)
    whole = backend == STABLE  # pieces may run uncompiled, and then sort as they are written
    with torch._dynamo.config.patch(capture_scalar_outputs=whole):
        torch.save(run_steps(subject, compiled), _path(folder, backend, rank))


def compare_with(
    rank: int, name: str, options: Mapping[str, Any], backends: list[str], folder: str
) -> dict[str, Any]:
    """Run by megamoe; return how it differs from what each backend computed, and what it did."""
    _forget()
    subject = find_case(name).build(rank)
    compiled = torch.compile(subject.model, backend="megamoe", options=dict(options))
    first: dict[str, Any] = {}

    def after_first() -> None:
        first["graphs"] = counters["stats"]["unique_graphs"]

    found = run_steps(subject, compiled, after_first)
    kept = {one: torch.load(_path(folder, one, rank)) for one in backends}
    report = REPORT.as_dict()
    return first | {
        "differences": {one: differences(found, expected) for one, expected in kept.items()},
        "num_compared": len(found),
        "regions": [[r["where"], r["verdict"], r["num_chunks"]] for r in report["regions"]],
        "breaks": report["graph_breaks"],
        "warnings": report["warnings"],
        "left_alone": report["left_alone"],
        "dropped_passes": report["dropped_passes"],
    }


def _with_stable_sorts(gm: fx.GraphModule, inputs: list[Any]) -> Any:
    for node in filter(is_open_sort, gm.graph.nodes):
        if "dispatch" not in source_place(node):  # as megamoe: what is sent is sorted as it was
            make_stable(node)
    gm.recompile()
    return lookup_backend("aot_eager")(gm, inputs)


def _forget() -> None:
    forget_compiled()
    counters.clear()
    REPORT.compilations.clear()
    REPORT.warnings.clear()
    REPORT.graph_breaks.clear()


def _path(folder: str, backend: str, rank: int) -> Path:
    return Path(folder) / f"{backend}-{rank}.pt"
