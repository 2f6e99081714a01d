"""Passes change graphs through `moe_compile.graph.edit` alone, where every edit is checked."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
EDITS = {
    "erase_node",
    "replace_all_uses_with",
    "prepend",
    "eliminate_dead_code",
    "replace_input_with",
}
SOURCES = [
    path
    for folder in ("moe_compile", "passes", "torchtitan_integration")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
EDITORS = ("moe_compile/graph/edit.py", "moe_compile/graph/snapshot.py")
"""Checked edits; putting a graph back as it was."""


def edits(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in EDITS:
            yield f"line {node.lineno}: {node.attr}"


def test_no_other_file_moves_replaces_or_erases_nodes():
    others = [path for path in SOURCES if str(path.relative_to(ROOT)) not in EDITORS]
    assert {str(path): found for path in others if (found := list(edits(path)))} == {}


def test_the_files_that_may_do_so():
    assert any(edits(ROOT / EDITORS[0]))
