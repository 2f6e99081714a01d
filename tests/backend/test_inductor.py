"""Inductor's cache knows our passes, and a model without regions is Inductor's alone.

What identifies our passes is asked for without Inductor in test_level_pass.py.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(program, cache, *choices, root=ROOT):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{ROOT}",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
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
OTHERS = ({"megamoe.chunks": 3}, {**TWO, "megamoe.hardware": "h100"})


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(scope="module")
def first(cache):
    """What the process said that filled the cache."""
    return run("first", cache, TWO)


def hits_and_misses(counted):
    return counted["hit"], counted["miss"]


def test_a_second_process_hits_and_another_option_misses(first, cache):
    assert first["cache"] == {"hit": 0, "miss": 2, "bypass": 0}
    again, other = run("cached", cache, TWO, LESS_MEMORY)
    assert hits_and_misses(again) == (2, 0)
    assert hits_and_misses(other) == (0, 2)


@pytest.mark.slow
def test_other_options_miss(first, cache):
    assert [hits_and_misses(x) for x in run("cached", cache, *OTHERS)] == [(0, 2)] * len(OTHERS)


@pytest.mark.slow
def test_a_changed_source_file_misses(first, cache, tmp_path):
    for folder in ("moe_compile", "passes", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (same,) = run("cached", cache, TWO, root=tmp_path)
    assert same["hit"] == 2  # a copy of the sources elsewhere is the same source
    changed = tmp_path / "moe_compile/graph/query.py"
    changed.write_text(changed.read_text() + "\n# changed\n")
    (other,) = run("cached", cache, TWO, root=tmp_path)
    assert hits_and_misses(other) == (0, 2)


def test_in_generated_code_each_chunks_exchange_runs_under_the_others_gemms(first):
    """Repeated waits of the count exchange aside: forward dispatch 0, 1, then under 1 experts 0."""
    forward, backward = first["order"]
    assert re.search(r"LL.*W.*m+.*L.*W.*m+.*L", forward), forward
    between = re.findall(r"L([Lm]*)W", backward)
    assert backward.startswith("LL"), backward
    assert any("m" in work for work in between), backward


def test_without_regions_the_code_is_what_inductor_alone_generates(first):
    assert first["dense"] == {"difference": [], "graphs": 2}
