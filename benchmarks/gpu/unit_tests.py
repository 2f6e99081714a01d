"""Section `tests`: our tests, run by pytest on this machine's torch and GPU.

Contract
    Each run is a process of its own and is killed when the section's time is over.
    Tests marked `gpu` are found by their mark's name in the sources, so that no file is collected
    for nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.sizes import Sizes
from moe_compile.check.sections import Record, say

ROOT: Final = Path(__file__).parents[2]
IMPORTS: Final = ("moe_compile.backend", "passes.pipeline", "moe_compile.testing.strategies")
UNIT: Final = "not slow and not exhaustive and not gpu and not multigpu"
GPU: Final = "gpu and not multigpu"
GPU_PART: Final = 0.6
"""Of the time, for tests marked `gpu`: each new size compiles a kernel."""
LEAST_S: Final = 10.0
RELAXED: Final = {"CI": "true"}
"""hypothesis then knows no deadline: the first call on a GPU takes seconds."""
TAIL: Final = 3000
"""Characters kept of a failing run's output."""


def check_tests(record: Record, sizes: Sizes) -> None:
    """Run the section."""
    record.attempt("imports", lambda: _imports(record))
    if sizes.device == "cuda":
        limit_s = GPU_PART * record.left_s()
        record.attempt("gpu tests", lambda: _pytest(record, "gpu", GPU, _marked_gpu(), limit_s))
    what = "unit tests"
    record.attempt(
        what, lambda: _pytest(record, "unit", UNIT, sizes.tests, record.left_s()), LEAST_S
    )


def _imports(record: Record) -> None:
    code = "".join(f"import {module}\n" for module in IMPORTS)
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=record.left_s(), check=False
    )
    record.expect(done.returncode == 0, "imports", done.stderr[-TAIL:])


def _marked_gpu() -> list[str]:
    """Return the test files that mention the mark."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(f.relative_to(ROOT)) for f in files if "pytest.mark.gpu" in f.read_text()]


def _pytest(record: Record, name: str, marks: str, files: Sequence[str], limit_s: float) -> None:
    report = record.path.parent.resolve() / f"{name}_tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-m", marks, f"--junitxml={report}", *files]
    output = ""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **RELAXED}, capture_output=True, text=True,
            timeout=limit_s, check=False,
        )  # fmt: skip
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as expired:
        output, code = (expired.stdout or b"").decode(errors="replace"), None
    row = {"run": name, "command": command[1:], "exit_code": code, **_summary(report)}
    record.add_row({**row, "output_tail": output[-TAIL:] if code != 0 else ""})
    say(f"{name} tests: " + (output.strip().splitlines() or ["no output"])[-1])
    why = "out of time" if code is None else f"pytest ended with {code}"
    record.expect(code == 0, f"{name} tests", why)
    ran = row.get("tests", 0) - row.get("skipped", 0)
    record.expect(ran > 0 or code != 0, f"{name} tests", "none ran: all were skipped")


def _summary(report: Path) -> dict[str, Any]:
    """Return pytest's counts and the names of what did not pass."""
    if not report.exists():
        return {}
    (suite,) = ET.parse(report).getroot().iter("testsuite")
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {**counts, "seconds": float(suite.get("time", 0)), "not_passed": failed}
