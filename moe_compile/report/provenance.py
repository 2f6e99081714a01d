"""The origin of recorded results: the command, the commit, the machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_compile.hardware.measure import cpu_name


def recorded_command(module: str, arguments: Sequence[str]) -> str:
    """Return `python -m module arguments`, absolute paths cut to their last part.

    >>> recorded_command("benchmarks.link.overlap", ["--json", "/there/wire.json"])
    'python -m benchmarks.link.overlap --json wire.json'
    """
    return shlex.join(["python", "-m", module, *(_portable(a) for a in arguments)])


def _portable(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    return option + equals + Path(value).name if Path(value).is_absolute() else argument


def describe_machine() -> dict[str, Any]:
    """Return hardware and versions, for the head of the results."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megamoe": revision(),
    }


def revision() -> str:
    """Return the commit of these sources, `-dirty` when they differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()
