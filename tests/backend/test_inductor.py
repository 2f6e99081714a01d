"""Inductor's cache knows our passes, and a model without regions is Inductor's alone.

What identifies our passes is asked for without Inductor in test_level_pass.py.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(program, tag, *choices, root=ROOT):
    """Run a program in a process that finds in Inductor's cache what has the same tag.

    In the cache of all tests: a folder of its own would want torch's headers compiled again.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{ROOT}",
        "TORCH_COMPILE_CACHE_KEY_TAG": tag,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.backend.inductor_runs", program, *map(json.dumps, choices)],
        cwd=root, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


TWO = {"megamoe.chunks": 2}
LESS_MEMORY = {**TWO, "megamoe.max_memory_increase": 0.2}
PRICED = {"megamoe.equal_tokens": True, "megamoe.recompute": "price"}
HALF = {**PRICED, "megamoe.activation_budget": 0.5}
OTHERS = (
    LESS_MEMORY,
    {"megamoe.chunks": 3},
    {**TWO, "megamoe.hardware": "h100"},
    {**TWO, "megamoe.disable_passes": ["save_exchanges"]},
    {**TWO, "megamoe.measure_waits": True},
    HALF,
    {**PRICED, "megamoe.activation_budget": 0.4},
)


@pytest.fixture(scope="module")
def tag():
    return str(uuid.uuid4())


@pytest.fixture(scope="module")
def first(tag):
    """What the process said that filled the cache."""
    return run("first", tag, TWO)


def hits_and_misses(counted):
    """Return those of graphs and those of programs; no program may pass the cache by."""
    assert counted["program_bypass"] == 0
    return tuple(counted[key] for key in ("hit", "miss", "program_hit", "program_miss"))


HITS, MISSES = (2, 0, 1, 0), (0, 2, 0, 1)
"""Of a program compiled into a forward and a backward graph."""


@pytest.mark.slow
def test_a_second_process_hits(first, tag):
    assert hits_and_misses(first["cache"]) == MISSES and first["cache"]["bypass"] == 0
    (again,) = run("cached", tag, TWO)
    assert hits_and_misses(again) == HITS


@pytest.mark.slow
def test_other_options_miss(first, tag):
    assert [hits_and_misses(x) for x in run("cached", tag, *OTHERS)] == [MISSES] * len(OTHERS)
    (again,) = run("cached", tag, HALF)
    assert hits_and_misses(again) == HITS


@pytest.mark.slow
def test_a_changed_source_file_misses(first, tag, tmp_path):
    for folder in ("moe_compile", "passes", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (same,) = run("cached", tag, TWO, root=tmp_path)
    assert hits_and_misses(same) == HITS  # a copy of the sources elsewhere is the same source
    changed = tmp_path / "moe_compile/graph/query.py"
    changed.write_text(changed.read_text() + "\n# changed\n")
    (other,) = run("cached", tag, TWO, root=tmp_path)
    assert hits_and_misses(other) == MISSES


def test_in_generated_code_each_chunks_exchange_runs_under_the_others_gemms(first):
    """Repeated waits of the count exchange aside: forward dispatch 0, 1, then under 1 experts 0."""
    forward, backward = first["order"]
    assert re.search(r"LL.*W.*m+.*L.*W.*m+.*L", forward), forward
    between = re.findall(r"L([Lm]*)W", backward)
    assert backward.startswith("LL"), backward
    assert any("m" in work for work in between), backward


def test_without_regions_the_code_is_what_inductor_alone_generates(first):
    assert first["dense"] == {"difference": [], "graphs": 2}
