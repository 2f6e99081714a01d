"""Lanes of other torches: what they run, what they hold losses to, and what the page says."""

import json
from pathlib import Path

import pytest

from benchmarks.lanes import __main__ as command
from benchmarks.lanes.steps import (
    LANES,
    LEAST,
    LOGS,
    REPORT,
    STEPS,
    chunks_of_example,
    example,
    farthest,
    losses_in,
    steps_of,
)
from benchmarks.lanes.table import page_of

PYPROJECT = Path("pyproject.toml").read_text()


def test_the_least_torch_is_the_declared_one_and_runs_the_gpu_check_too():
    assert f'"torch>={LEAST.rpartition(".")[0]}"' in PYPROJECT
    more = {s.name for s in steps_of(LEAST, 1)} - {s.name for s in steps_of(LANES[-1], 1)}
    assert more == {"gpu check without a gpu"}


def test_the_example_is_the_readmes():
    compile(example(), "example.py", "exec")
    assert 'backend="megamoe"' in example()
    assert str(LOGS / REPORT) in example()


def test_an_example_that_ran_whole_has_not_passed(tmp_path):
    report = tmp_path / REPORT
    report.write_text(json.dumps({"regions": [{"num_chunks": 4}]}))
    assert chunks_of_example(tmp_path / "2.11.0") == "4 chunks"
    for regions in (None, [], [{"num_chunks": 1}]):
        if regions is not None:
            report.write_text(json.dumps({"regions": regions}))
        with pytest.raises(ValueError, match="not chunked"):
            chunks_of_example(tmp_path / "2.11.0")


def test_losses_are_held_to_those_of_eager_step_by_step():
    log = "".join(f"[titan] step: {n:2}  loss:  {8 / n:.4f}  grad_norm:  1\n" for n in range(1, 11))
    losses = losses_in(log)
    assert len(losses) == STEPS and farthest(losses, losses) == 0
    assert farthest({**losses, 3: losses[3] * 1.5}, losses) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="10 wanted"):
        farthest({1: 8.0}, {1: 8.0})


def test_what_passed_is_not_run_again(tmp_path, monkeypatch):
    ran = []

    def run(step, version):
        ran.append((version, step.name))
        return {"passed": step.name == "import", "said": "", "date": "2026-01-01", "s": 1}

    monkeypatch.setattr(command, "_run", run)
    monkeypatch.setattr(command, "_environment", lambda version: tmp_path / version)
    monkeypatch.setattr(command, "LOGS", tmp_path / "logs")
    paths = ["--results", str(tmp_path / "r.json"), "--page", str(tmp_path / "page.md")]
    for _ in range(2):
        assert command.main(["2.11.0", "--steps", "import", "example", *paths]) == 1
    assert ran == [("2.11.0", "import"), *[("2.11.0", "example")] * 2]
    page = (tmp_path / "page.md").read_text()
    assert "| import | 2026-01-01 |  |" in page and "| example | no, 2026-01-01 |  |" in page


def test_the_page_is_that_of_the_results():
    record = json.loads(command.RESULTS.read_text())
    assert command.PAGE.read_text() == page_of(record)
