"""Run commands, with all processes that they start, for a limited time.

Contract
    When a call returns, no process of the commands' sessions is left, whatever way they ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

POLL_S: Final = 0.05


def run_limited(
    command: Sequence[str],
    log: Path,
    limit_s: float,
    environment: Mapping[str, str],
    *,
    keeps_output: bool = False,
    grace_s: float = 0.0,
) -> int | None:
    """Run a command; return its exit code, None when the time was over; stderr goes to `log`.

    So does stdout with `keeps_output`. A command that starts processes in sessions of their own,
    as torchrun does, has `grace_s` to end them.
    """
    with _started(command, log, environment, keeps_output=keeps_output, grace_s=grace_s) as process:
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None


def run_ranks(
    commands: Sequence[Sequence[str]],
    logs: Sequence[Path],
    limit_s: float,
    environments: Sequence[Mapping[str, str]],
    *,
    patience_s: float,
) -> list[int | None]:
    """Run commands beside one another, as `run_limited`; return their exit codes.

    Once one has failed the others have `patience_s`: they may wait for it in vain.
    """
    end = time.monotonic() + limit_s
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(_started(command, log, environment))
            for command, log, environment in zip(commands, logs, environments, strict=True)
        ]
        has_failed = False
        while time.monotonic() < end:
            codes = [process.poll() for process in processes]
            if all(code is not None for code in codes):
                break
            if any(codes) and not has_failed:
                has_failed, end = True, min(end, time.monotonic() + patience_s)
            time.sleep(POLL_S)
        return [process.poll() for process in processes]


@contextlib.contextmanager
def _started(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    *,
    keeps_output: bool = False,
    grace_s: float = 0.0,
) -> Any:
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
            yield process
        finally:
            if grace_s and process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=grace_s)
            with contextlib.suppress(ProcessLookupError):  # all of it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
