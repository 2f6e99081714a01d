"""Why nothing of a process was rewritten, in one sentence, of a report's JSON data.

Contract
    Imports no torch. "" where something was; the reason that was met first where nothing was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from moe_compile.report.explanation_text import NOTHING_DONE, NOTHING_SEEN

NOT_COMPILED: Final = "Dynamo gave megamoe no graph"
DONE: Final = frozenset({"chunked", "all-gathered", "dispatched in two hops", "left whole"})
"""Verdicts on regions that are proven; one that is left whole is scheduled."""
APPLIED: Final = ": applied to "
"""In what a report says of a rewrite of another package."""


def why_nothing_was_rewritten(report: Mapping[str, Any]) -> str:
    """Return the first reason, "" where something was rewritten."""
    return "" if _is_rewritten(report) else next(_reasons(report))


def _is_rewritten(report: Mapping[str, Any]) -> bool:
    return (
        any(region["verdict"] in DONE for region in report["regions"])
        or any(a["num_chunks"] > 1 for a in report["attention"])
        or any(APPLIED in line for line in report.get("rewrites", ()))
        or any("gradient_bytes" in graph for graph in report["graphs"])
    )


def _reasons(report: Mapping[str, Any]) -> Iterator[str]:
    for region in report["regions"]:
        changes = " ".join(region.get("to_do", ()))
        yield f"the experts of the exchange at {region['where']}: {region['verdict']}. {changes}"
    yield from (line.removeprefix("megamoe: ") for line in report.get("warnings", ()))
    yield from (f"Dynamo ends a graph at {place}" for place in report.get("graph_breaks", ()))
    if not report.get("num_graphs", 1):
        yield NOT_COMPILED
    yield f"{NOTHING_SEEN}. To do: {NOTHING_DONE}"
