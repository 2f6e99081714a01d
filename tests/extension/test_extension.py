"""A package outside this repository, installed where pip puts it, adds a rewrite and a profile."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extension.balanced import NAME

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
TRANSPORT = "column_halves"
EARLY, LATE = ["all_reduce", "tanh"], ["tanh", "all_reduce"]


def install(folder, *changes, package=NAME):
    """Install an example as it is but for `changes` of its text; return where to."""
    copy, target = folder / package, folder / "target"
    shutil.copytree(Path(__file__).parent / package, copy)
    for file, old, new in changes:
        path = copy / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    subprocess.run([*PIP, "--target", target, copy], check=True, timeout=300)
    return target


def python(target, call, *arguments):
    """Call what stands in `balanced` in a new process that finds what `target` has."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), str(ROOT)])}
    code = f"from tests.extension import balanced\nprint('RESULT', balanced.{call})"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, cwd=ROOT,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.rpartition("RESULT ")[2])


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return install(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def both(installed):
    return install(installed.parent, package=TRANSPORT)


@pytest.fixture(scope="module")
def as_it_is(both):
    return python(both, "identity()")


PRICED = {"equal_tokens": True, "hardware": "h100"}
RUNS = {
    "dense": ("dense", PRICED),
    "sparse": ("sparse", PRICED),
    "unequal": ("sparse", {}),
    "disabled": ("dense", {"disable_passes": [NAME]}),
    "routed": ("sparse", {"transport": TRANSPORT, "disable_passes": [NAME]}),
    "gathered": ("sparse", {**PRICED, "transport": TRANSPORT, "dispatch": "all_gather"}),
}


@pytest.fixture(scope="module")
def runs(both):
    results = python(both, "run_all()", json.dumps(list(RUNS.values())))
    return dict(zip(RUNS, results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_no_bit_changes_and_ranks_decide_alike(runs, run):
    first, second = runs[run]
    assert first["differs"] == second["differs"] == []
    assert first["order"] == second["order"] and first["digest"] == second["digest"]


@pytest.mark.slow
def test_the_all_reduce_stands_before_what_was_before_it_and_the_report_has_both_prices(runs):
    for kind in ("dense", "sparse"):
        run = runs[kind][0]
        assert run["has_work"] and run["order"][0] == "all_reduce"
        (said,) = run["reported"]
        assert len(said["applied"]) == 1 and "to before matmul" in said["applied"][0]
        times = said["measures"]
        (line,) = run["lines"]
        assert line.startswith(f"{NAME}: applied to tensor") and "ms before" in line
        assert 0 < times["predicted_us"] <= times["predicted_us_before"]
    assert runs["dense"][0]["order"] == EARLY
    assert times["predicted_us"] != runs["dense"][0]["reported"][0]["measures"]["predicted_us"]


@pytest.mark.slow
def test_ranks_that_do_not_promise_equal_sizes_have_no_price(runs):
    (said,) = runs["unequal"][0]["reported"]
    assert len(said["applied"]) == 1 and said["measures"] == {}
    assert "predicted" not in runs["unequal"][0]["lines"][0]


@pytest.mark.slow
def test_disabling_it_by_name_leaves_the_graph_to_inductor(runs):
    run = runs["disabled"][0]
    assert run["order"] == LATE and not run["has_work"] and not run["reported"]


@pytest.mark.slow
def test_a_transport_carries_rows_of_every_chunk_and_no_counts(runs):
    run = runs["routed"][0]
    assert run["order"] == ["all_to_all_single"] * (1 + 2 * 2 * 2) + ["all_reduce"]
    (said,) = run["routed"]
    assert said["applied"] == [f"{n} of region 0 by {TRANSPORT}" for n in ("dispatch", "combine")]
    assert said["measures"] == {"row_bytes_before": 32.0, "row_bytes": 32.0}


@pytest.mark.slow
def test_what_a_transport_lacks_is_said_and_the_exchange_stays(runs):
    """Tokens that are gathered have no example: a region on these has no price either, since its
    graph, and so what is predicted of it, differs by rank."""
    run = runs["gathered"][0]
    assert run["order"].count("all_gather_into_tensor") == 3
    (said,) = run["routed"]
    assert not said["applied"] and len(said["skipped"]) == 2
    assert all("even number of columns" in one["detail"] for one in said["skipped"])
    assert run["reported"][0]["applied"] and run["reported"][0]["measures"] == {}


def test_a_profile_is_known_by_its_name(installed):
    found = python(installed, "identity()")
    assert found["profile"] == "two nodes"
    assert "Did you mean 'two_nodes'" in found["unknown"]


@pytest.mark.slow
def test_an_edit_of_its_source_changes_cache_keys_and_what_ranks_compare(as_it_is, tmp_path):
    """Where the packages lie does not."""
    for name in ("same", "edited"):
        install(tmp_path / name, package=TRANSPORT)
    same = python(install(tmp_path / "same"), "identity()")["packages"]
    comment = ("hoist_all_reduce.py", "class Hoist:", "class Hoist:  # edited")
    edited = python(install(tmp_path / "edited", comment), "identity()")
    assert edited["uuid"] != as_it_is["uuid"] and edited["plan"] != as_it_is["plan"]
    assert edited["packages"] != as_it_is["packages"] == same


@pytest.mark.slow
def test_one_that_cannot_be_imported_names_its_distribution_and_what_to_write(tmp_path):
    typo = ("pyproject.toml", "hoist_all_reduce:HoistAllReduce", "hoist_all_reduce:Hoister")
    said = python(install(tmp_path, typo), "identity()")["error"]
    assert "entry point hoist_all_reduce = 'hoist_all_reduce:Hoister'" in said
    assert "from distribution hoist-all-reduce 0.1.0, cannot be imported (AttributeError" in said
    assert 'write name = "module:object", or uninstall' in said
