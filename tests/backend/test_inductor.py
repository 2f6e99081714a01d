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


def run(program, options, cache, root=ROOT):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{ROOT}",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.backend.inductor_runs", program, json.dumps(options)],
        cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


@pytest.fixture(scope="module")
def warm_cache(tmp_path_factory):
    cache = tmp_path_factory.mktemp("inductor")
    first = run("cached", {"megamoe.chunks": 2}, cache)
    assert (first["hit"], first["miss"], first["bypass"]) == (0, 2, 0)
    return cache


def test_a_second_process_hits(warm_cache):
    again = run("cached", {"megamoe.chunks": 2}, warm_cache)
    assert (again["hit"], again["miss"]) == (2, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"megamoe.chunks": 2, "megamoe.max_memory_increase": 0.2},
        pytest.param({"megamoe.chunks": 3}, marks=pytest.mark.slow),
        pytest.param({"megamoe.chunks": 2, "megamoe.hardware": "h100"}, marks=pytest.mark.slow),
    ],
)
def test_another_option_misses(warm_cache, options):
    other = run("cached", options, warm_cache)
    assert (other["hit"], other["miss"]) == (0, 2)


@pytest.mark.slow
def test_a_changed_source_file_misses(warm_cache, tmp_path):
    for folder in ("moe_compile", "passes", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    same = run("cached", {"megamoe.chunks": 2}, warm_cache, tmp_path)
    assert same["hit"] == 2  # a copy of the sources elsewhere is the same source
    changed = tmp_path / "moe_compile/graph/query.py"
    changed.write_text(changed.read_text() + "\n# changed\n")
    other = run("cached", {"megamoe.chunks": 2}, warm_cache, tmp_path)
    assert (other["hit"], other["miss"]) == (0, 2)


def test_in_generated_code_each_chunks_exchange_runs_under_the_others_gemms(tmp_path):
    """Repeated waits of the count exchange aside: forward dispatch 0, 1, then under 1 experts 0."""
    forward, backward = run("order", {"megamoe.chunks": 2}, tmp_path)
    assert re.search(r"LL.*W.*m+.*L.*W.*m+.*L", forward), forward
    between = re.findall(r"L([Lm]*)W", backward)
    assert backward.startswith("LL"), backward
    assert any("m" in work for work in between), backward


def test_without_regions_the_code_is_what_inductor_alone_generates(tmp_path):
    result = run("without_regions", {}, tmp_path)
    assert result == {"difference": [], "graphs": 2}
