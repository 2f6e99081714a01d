"""What other backends compile beside megamoe is what they compile without it, and what is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WAYS = ("alone", "beside megamoe", "switched off")


def started(way):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.torch_quirks.bystander", way],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def seen():
    """Return what a process of each way said."""
    said = {}
    for way, process in {way: started(way) for way in WAYS}.items():
        out, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors[-3000:]
        (line,) = [text for text in out.splitlines() if text.startswith("RESULT ")]
        said[way] = json.loads(line.removeprefix("RESULT "))
    return [said[way] for way in WAYS]


def test_programs_without_host_reads_are_compiled_as_ever(seen):
    """Graphs, compiled frames and values: shapes of data, branches, limits, an optimizer's step."""
    alone, beside, off = (one["others"] for one in seen)
    assert alone == beside == off
    assert alone["shaped"]["graphs"] == 2


def test_one_setting_of_torch_is_another(seen):
    """The limit of recompilations was not reached, where there is a second."""
    alone, beside, off = (one["settings"] for one in seen)
    changed = {(m, key) for m in alone for key in alone[m] if alone[m][key] != beside[m][key]}
    assert changed == {("torch._dynamo.config", "capture_scalar_outputs")}
    assert off == alone


def test_programs_that_read_the_host_have_fewer_graphs_and_the_same_values(seen):
    alone, beside, _ = (one["readers"] for one in seen)
    assert alone["loss"]["graphs"] > beside["loss"]["graphs"]
    for name, found in beside.items():
        assert found["values"] == alone[name]["values"]


def test_a_function_may_be_kept_apart(seen):
    """The same graphs and values; Dynamo may look at fewer functions that hold none."""
    alone, beside, off = (
        {name: (found["graphs"], found["values"]) for name, found in one["readers apart"].items()}
        for one in seen
    )
    assert alone == beside == off


def test_a_layer_in_one_whole_graph_needs_no_setting(seen):
    alone, beside, off = seen
    assert set(beside["regions"]) == set(off["regions"]) == {"chunked"}
    assert off["readers"] == alone["readers"]
