"""What results tell of the command holds on any machine."""

import json
import re
from pathlib import Path

import pytest

from moe_compile.report.provenance import recorded_command

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks/results").glob("*.json"))
PROGRAMS = tuple(f"python -m {name}" for name in ("benchmarks.", "moe_compile.testing.", "tests."))
ABSOLUTE = re.compile(r"(?<![\w.)/])/\w+/\w")
"""A path from the root of a machine's files: two folders deep or more."""


def test_places_of_files_keep_their_last_part_alone():
    given = ["--json", "/a/b/wire.json", "--cache=/a/c", "--variants", "N=1 a", "x/y.json"]
    assert recorded_command("benchmarks.link.overlap", given) == (
        "python -m benchmarks.link.overlap --json wire.json --cache=c --variants 'N=1 a' x/y.json"
    )


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_results_name_no_place_of_one_machine(path):
    text = path.read_text()
    assert not ABSOLUTE.search(text)
    result = json.loads(text)
    for run in result.get("runs", [result]):
        assert run["command"].startswith(PROGRAMS)
