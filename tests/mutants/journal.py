"""Which mutants were killed before: tests only grow, so those need not run again.

Contract
    Entries are found by place and change. Begin a new file when tests were taken away.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.mutants.sandbox import Outcome


class Journal:
    """A file with one line per killed mutant, or none."""

    def __init__(self, path: Path | None) -> None:
        """Read what the file at `path` has, if it exists."""
        self._path = path
        self.outcomes: dict[str, Outcome] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self.outcomes[entry["mutant"]] = Outcome(False, entry["cpu_s"], entry["said"])

    def add(self, mutant: str, outcome: Outcome) -> None:
        """Note that `mutant` was killed, if it was."""
        if outcome.passed or self._path is None:
            return
        entry = {"mutant": mutant, "cpu_s": outcome.cpu_s, "said": outcome.said}
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
