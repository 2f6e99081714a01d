"""The findings in words: the gain, each exchange, where graphs break, why nothing was rewritten.

Contract
    Reads JSON data; imports no torch, and no package that draws tables.
    Why nothing was rewritten is one sentence, the first reason met; "" where something was.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

WIDTH: Final = 110
INDENT: Final = 14
"""Columns of a line, and of its indent."""
ONE_GRAPH: Final = (
    "megamoe sees one graph at a time: the exchange of counts, the dispatch, the experts and the "
    "combine must lie between two breaks. Breaks elsewhere do no harm"
)
NOTHING_SEEN: Final = (
    "no all-to-all is in any graph. Either the model has no expert parallelism (one rank to a "
    "group), or its exchanges run where Dynamo does not look: inside a graph break, in a function "
    "under torch.compiler.disable, in a hook, or in an operator of its own (DeepEP)"
)
NOTHING_DONE: Final = (
    "write the exchanges with torch.distributed._functional_collectives, in the forward that is "
    "compiled"
)


def explanation_lines(
    exchanges: Sequence[Mapping[str, Any]],
    breaks: Sequence[str],
    num_graphs: int,
    *,
    title: str = "megamoe",
    is_whole: bool,
) -> Iterator[str]:
    """Yield the lines; `is_whole` says whether all graphs were seen."""
    found = sum(one["is_found"] for one in exchanges)
    graphs, seen = _some(num_graphs, "graph"), _some(len(exchanges), "exchange")
    yield f"{title}: {graphs}, {seen}, {found} found"
    for one in exchanges:
        yield from ("", one["where"] or "(line unknown)")
        yield from _entry("found" if one["is_found"] else "not found", one["what"], one)
    if not exchanges and is_whole:
        yield from ("", *_pair("not found", NOTHING_SEEN), *_pair("change", NOTHING_DONE))
    for place in breaks:
        yield from ("", *_pair("graph break", place))
    if breaks:
        yield from _pair("change", f"{ONE_GRAPH}.")
    if not is_whole:
        yield from _pair("", "Graphs after this one are seen only on ranks that can run the model.")
    yield ""


def _some(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _entry(word: str, what: str, one: Mapping[str, Any]) -> Iterator[str]:
    if what:
        yield from _pair(word, what)
        word = "left whole"
    if one["because"]:
        yield from _pair(word, one["because"])
    if one["change"]:
        yield from _pair("change", one["change"])


def _pair(word: str, text: str) -> Iterator[str]:
    first, *others = textwrap.wrap(text, WIDTH - INDENT, break_long_words=False)
    yield f"  {word:<{INDENT - 2}}{first}"
    yield from (" " * INDENT + line for line in others)


def headline(report: Mapping[str, Any]) -> str:
    """Return a line on exposed communication per block, before and now; "" without exchanges.

    Of graphs that were compiled again, the newest counts.
    """
    timed = [g for g in report["graphs"] if {"exposed_us", "exposed_us_before"} <= g.keys()]
    newest = {(g["where"], g["phase"]): g for g in timed if g.get("exchange_us")}
    if not newest:
        return ""
    blocks = len({where for where, _ in newest})
    before, now = (
        sum(g[k] for g in newest.values()) / blocks / 1e3
        for k in ("exposed_us_before", "exposed_us")
    )
    return (
        f"megamoe: exposed {before:.1f} -> {now:.1f} ms per block, predicted for hardware profile "
        f"{report['hardware']!r}"
    )


NOT_COMPILED: Final = "Dynamo gave megamoe no graph"
DONE: Final = frozenset(
    {"chunked", "all-gathered", "dispatched in two hops", "without host reads", "left whole"}
)
"""Verdicts on regions that are proven; one that is left whole is scheduled."""
APPLIED: Final = ": applied to "
"""Part of a report's text on a rewrite of another package."""


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
