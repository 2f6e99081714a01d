"""What the ranks of a job printed, as torchrun keeps it: FOLDER/run/attempt/rank/stderr.log.

Contract
    Errors are those of the newest run; a few runs before it are kept. A folder that is not as
    expected has nothing to say.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

ERROR: Final = re.compile(
    r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Disagreement)\b.*)"
)
"""The last line of a traceback."""
KEPT_RUNS: Final = 4
"""Runs whose output stays when another begins."""
MOST_RANKS: Final = 4
"""Ranks of which errors are shown: those of others repeat them."""


def drop_old(folder: Path) -> None:
    """Remove what the ranks of runs before the newest printed."""
    runs = sorted(_folders(folder), key=lambda run: run.stat().st_mtime_ns)
    for run in runs[:-KEPT_RUNS]:
        shutil.rmtree(run, ignore_errors=True)


def last_errors(folder: Path) -> list[str]:
    """Return `rank N: error` of ranks that ended by one, the last error of each."""
    runs = sorted(_folders(folder), key=lambda run: run.stat().st_mtime_ns)
    files = sorted(runs[-1].glob("attempt_*/*/stderr.log"), key=_rank) if runs else []
    found = [(_rank(file), error) for file in files if (error := _last_error(file))]
    return [f"rank {rank}: {error}" for rank, error in found[:MOST_RANKS]]


def _folders(folder: Path) -> list[Path]:
    """Return the folders of runs; what torchrun did not make is none."""
    return [path.parent for path in folder.glob("*/attempt_0") if path.is_dir()]


def _rank(file: Path) -> int:
    return int(file.parent.name) if file.parent.name.isdigit() else 0


def _last_error(file: Path) -> str:
    lines = file.read_text(errors="replace").splitlines()
    errors = [match[1] for line in lines if (match := ERROR.match(line))]
    return errors[-1] if errors else ""
