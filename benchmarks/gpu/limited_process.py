"""Run a command for so long and no longer, with all that it started.

Contract
    When this returns, no process of the command's session is left, whatever way it ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_limited(
    command: Sequence[str],
    log: Path,
    limit_s: float,
    environment: Mapping[str, str],
    *,
    keeps_output: bool = False,
) -> int | None:
    """Return the exit code, None when the time was over; stderr goes to `log`.

    So does stdout if it `keeps_output`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdout=stderr if keeps_output else None,
            stderr=stderr,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # all of it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
