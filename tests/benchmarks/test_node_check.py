"""The check on several GPUs, as far as two processors can try it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.node.sizes import PROMISED_S
from benchmarks.node.summary import BARS
from moe_compile.check.bars import judge
from moe_compile.check.limited_process import run_ranks
from moe_compile.check.sections import LONGEST_S

ROOT = Path(__file__).parents[2]


def python(code):
    return [sys.executable, "-c", code]


def test_ranks_that_wait_for_one_that_failed_are_ended(tmp_path):
    commands = [python("raise SystemExit(3)"), python("import time; time.sleep(1000)")]
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    began = time.monotonic()
    codes = run_ranks(commands, logs, 600.0, [os.environ] * 2, patience_s=0.5)
    assert codes == [3, None] and time.monotonic() - began < 300
    assert run_ranks([python("")] * 2, logs, 600.0, [os.environ] * 2, patience_s=0.5) == [0, 0]


def test_sections_promise_no_more_than_eight_minutes_and_each_has_a_bar():
    assert max(PROMISED_S.values()) <= LONGEST_S == 8 * 60
    assert {name for name, _, _ in BARS} == set(PROMISED_S)


def section(*rows, failures=(), skipped=(), is_complete=True):
    told = {"failures": list(failures), "skipped": list(skipped), "is_complete": is_complete}
    return {"rows": list(rows) or [{}], **told}


FAILED = section(failures=[{"what": "one", "why": "wrong"}])
SEEDED = {
    "every rewrite and option has the bits of eager": (section(), FAILED),
}
"""Bar -> results for which it holds, and results with one fault."""


@pytest.mark.parametrize(("name", "what"), [bar[:2] for bar in BARS])
def test_a_bar_holds_and_is_missed_and_is_open(name, what):
    right, wrong = SEEDED[what]
    found = [
        next(bar.holds for bar in judge({name: one}, BARS) if bar.what == what)
        for one in (right, wrong, section(is_complete=False), {})
    ]
    assert found == [True, False, None, None]


def run_check(folder, *more):
    command = [sys.executable, "-m", "benchmarks.node", "--device=cpu", f"--out={folder}", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done, json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.alone
def test_every_section_passes_on_two_processors_and_is_not_run_again(tmp_path):
    done, summary = run_check(tmp_path)
    statuses = {name: found["status"] for name, found in summary["sections"].items()}
    assert statuses == dict.fromkeys(PROMISED_S, "passed"), done.stdout + done.stderr
    assert done.returncode == 0
    again, _ = run_check(tmp_path)
    assert again.returncode == 0
    assert "bits: passed before, its results stay" in again.stdout
