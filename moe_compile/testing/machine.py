"""What this machine is, for the head of recorded results."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from moe_compile.hardware.measure import cpu_name


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
    """Return the commit these sources are at, `-dirty` when they differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()
