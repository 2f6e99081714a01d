"""The command that results were made by, as they tell it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def recorded_command(module: str, arguments: Sequence[str]) -> str:
    """Return `python -m module arguments`, of absolute paths the last part: others have not ours.

    >>> recorded_command("benchmarks.link.overlap", ["--json", "/there/wire.json"])
    'python -m benchmarks.link.overlap --json wire.json'
    """
    return shlex.join(["python", "-m", module, *(_portable(a) for a in arguments)])


def _portable(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    return option + equals + Path(value).name if Path(value).is_absolute() else argument
