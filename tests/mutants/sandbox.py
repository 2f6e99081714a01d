"""A copy of the repository whose product can be changed, and tests that run in it.

Contract
    The repository itself is never written. Each run has CPU time as its limit, so a busy machine
    kills no mutant; time on the clock is bounded too, for what waits for ever.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

COPIED: Final = ("moe_compile", "passes", "tests")
LINKED: Final = (
    "benchmarks", "torchtitan_integration", "docs", "megamoe.py", "Makefile", "pyproject.toml",
    "README.md",
)  # fmt: skip

PASSED, FAILED, NOT_COLLECTED = 0, 1, 2
"""Exit statuses of pytest; a module that cannot be imported is not collected."""

ARGUMENTS: Final = (
    "-x", "-q", "--tb=line", "-p", "no:cacheprovider",
    "-m", "not slow and not exhaustive and not gpu and not multigpu", "--hypothesis-seed=0",
)  # fmt: skip


def copy_repository(folder: Path) -> None:
    """Make `folder` a copy whose product and tests can be changed."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a suite ended."""

    passed: bool
    cpu_s: float
    said: str
    """The first test that failed and why; "" when all passed."""


class Sandbox:
    """One copy in a temporary folder and a process that runs tests; use as a context manager."""

    def __enter__(self) -> Sandbox:
        """Copy the repository and start the process."""
        self._folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        copy_repository(self._folder)
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm_pytest.py"))],
            cwd=self._folder,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *raised: object) -> None:
        """End the process and remove the copy."""
        self._server.terminate()
        self._server.wait()
        shutil.rmtree(self._folder)

    def run_changed(self, module: str, source: str, tests: tuple[str, ...]) -> Outcome:
        """Run `tests` with `source` in the place of `module`, a path from the root."""
        whole = (self._folder / module).read_text()
        (self._folder / module).write_text(source)
        try:
            return self.run(tests)
        finally:
            (self._folder / module).write_text(whole)

    def run(self, tests: tuple[str, ...]) -> Outcome:
        """Run `tests` until one fails; RuntimeError when pytest itself fails."""
        output = self._folder / "output.txt"
        asked = {"arguments": [*ARGUMENTS, *tests], "output": str(output)}
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        ended = json.loads(self._server.stdout.readline())
        status, cpu_s = ended["status"], ended["cpu_s"]
        if status < 0:
            return Outcome(False, cpu_s, f"ended by signal {-status}: no end in time, or a crash")
        said = output.read_text()
        if status not in (PASSED, FAILED, NOT_COLLECTED):
            raise RuntimeError(f"pytest ended with {status}:\n{said}")
        return Outcome(status == PASSED, cpu_s, _first_failure(said))

    def _environment(self) -> dict[str, str]:
        changed = {
            "PYTHONPATH": str(self._folder),
            "PYTHONDONTWRITEBYTECODE": "1",  # a change's compiled file would outlive the change
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "cache"),
        }
        return {**os.environ, **changed}


def _first_failure(output: str) -> str:
    said = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return said[0][:300] if said else ""
