"""The texts of graphs in a report: the first lines of each, then what each step changes.

Contract
    Plain data. A step that changes no line is left out. What changed between two levels is torch's.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Final

from moe_compile.report.compilations import Compilation

TORCHS: Final = "torch, between levels of passes"


def texts_of(compilations: Sequence[Compilation]) -> list[dict[str, Any]]:
    """Return, of each graph, its place, name, first lines, and steps with their changes."""
    return [text for compilation in compilations for text in _of_one(compilation)]


def _of_one(compilation: Compilation) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    known: dict[str, tuple[str, ...]] = {}
    for text in compilation.journal.texts or ():
        one = {"where": compilation.site, "graph": text.graph, "lines": text.lines, "steps": []}
        steps = found.setdefault(text.graph, one)["steps"]
        if changes := _changes(known.get(text.graph, text.lines), text.lines):
            steps.append({"step": text.step or TORCHS, "changes": changes})
        known[text.graph] = text.lines
    return list(found.values())


def _changes(before: Sequence[str], after: Sequence[str]) -> list[list[Any]]:
    """Return [first line, line behind the last, lines in their place], in order."""
    if before == after:
        return []
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [[i, j, after[k:m]] for tag, i, j, k, m in codes if tag != "equal"]
