"""Imports point left: each room may import only its own layer and those before it."""

import ast
import functools
import pathlib

from moe_compile.source_hash import SOURCES as HASHED

ROOT = pathlib.Path(__file__).parents[2]
LAYERS = (  # left to right; longest prefix wins
    (
        "moe_compile.errors",
        "moe_compile.entry_points",
        "moe_compile.journal",
        "moe_compile.allowed_values",
        "moe_compile.config",
        "moe_compile.hardware",
        "moe_compile.source_hash",
        "moe_compile.torch_quirks.cache_files",
        "moe_compile.torch_quirks.python311_frames",
    ),
    ("moe_compile.ops", "moe_compile.runtime"),
    ("moe_compile.graph",),
    ("moe_compile.dims",),
    ("moe_compile.regions",),
    ("moe_compile.attention", "moe_compile.proof"),
    ("moe_compile.capacity",),
    ("moe_compile.batch",),
    ("moe_compile.cost",),
    ("moe_compile.schedule",),
    ("moe_compile.plan",),
    ("moe_compile.recompute",),
    ("moe_compile.report.region_reports",),
    ("passes",),
    ("moe_compile.report",),
    (
        "moe_compile.failed_compilation",
        "moe_compile.second_backward",
        "moe_compile.codegen",
        "moe_compile.first_run",
        "moe_compile.nothing_rewritten",
        "moe_compile.parts_by_price",
        "moe_compile.predicted_time",
        "moe_compile.read_options",
        "moe_compile.torch_quirks",
        "moe_compile.backend",
        "moe_compile.choices",
        "moe_compile.without_reads",
        "moe_compile.explanation",
    ),
    ("moe_compile.simulator",),
    ("moe_compile.testing",),
    ("moe_compile.check",),
    ("torchtitan_integration",),
    ("moe_compile.commands", "moe_compile.cli"),
)
RECIPE = ROOT / "torchtitan_integration"
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
SOURCES = [
    path
    for folder in ("moe_compile", "passes", "torchtitan_integration")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def room(module):
    names = [n for n in RANK if module == n or module.startswith(n + ".")]
    return max(names, key=len, default=None)


@functools.cache
def imports(path):
    """Return the modules that a file imports; a read of a file and its parsing serve all tests."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            found.append(node.module)
    return tuple(found)


def test_imports_point_left():
    wrong = {str(path.relative_to(ROOT)): found for path in SOURCES if (found := faults(path))}
    assert wrong == {}


def faults(path):
    """Return the imports of a file that its place does not allow."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    if path.name == "__init__.py":
        own = module.removesuffix(".__init__")
        others = (name for name in imports(path) if name != "typing")
        # nothing but files of its own folder
        return [name for name in others if name != own and not name.startswith(own + ".")]
    mine = room(module)
    if not mine:
        return ["it stands in no layer: add it to LAYERS"]
    rooms = {name: room(name) for name in imports(path)}
    return [name for name, theirs in rooms.items() if theirs and RANK[theirs] > RANK[mine]]


def test_what_no_hash_of_the_sources_has_is_imported_by_nothing_that_compiles():
    """An edit of the fuzzer or the simulator leaves what users have compiled in their caches."""
    beside = [p for p in SOURCES if p not in HASHED and not p.is_relative_to(RECIPE)]
    rooms = {f"moe_compile.{p.relative_to(ROOT).parts[1].removesuffix('.py')}" for p in beside}
    assert rooms == {
        f"moe_compile.{r}" for r in ("check", "cli", "commands", "simulator", "testing")
    }
    for path in {*SOURCES} & {*HASHED}:
        read = [n for n in imports(path) if any(f"{n}.".startswith(f"{r}.") for r in rooms)]
        assert not read, path


def test_benchmarks_are_imported_by_themselves_and_by_their_tests_alone():
    folders = ("moe_compile", "passes", "torchtitan_integration", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    readers = [p for p in paths if any(n.split(".")[0] == "benchmarks" for n in imports(p))]
    assert readers
    assert all(path.is_relative_to(ROOT / "tests" / "benchmarks") for path in readers), readers
