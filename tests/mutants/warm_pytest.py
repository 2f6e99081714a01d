"""Run pytest again and again, each time in a copy of this process that has torch loaded.

Contract
    A script: it imports nothing of the repository, so that every copy imports what is on disk
    then. Each line on stdin is the arguments of one run and the file its output goes to; the
    answer is a line with how it ended and the CPU time that it took. See `sandbox.py`.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

LIMIT_CPU_S = 120
"""CPU time of a run: twice what the slowest suite takes. A mutant that needs more is killed."""

LIMIT_S = 1800.0
"""Time on the clock of a run, for what waits for ever; a busy machine takes a part of it."""

LOADED = ("pytest", "hypothesis", "numpy", "sympy", "xdist.plugin", "pytest_cov.plugin")


def main() -> None:
    """Serve until stdin ends."""
    import torch  # noqa: PLC0415  (here, so that importing this file is cheap)

    for name in LOADED:
        importlib.import_module(name)
    torch.compile(lambda x: x.sin() + 1, backend="aot_eager")(torch.ones(2, requires_grad=True))
    torch._dynamo.reset()
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            _run(asked["arguments"], asked["output"])
        sys.stdout.write(json.dumps(_end_of(child)) + "\n")
        sys.stdout.flush()


def _run(arguments: list[str], output: str) -> None:
    """Be the copy: run pytest and end."""
    import pytest  # noqa: PLC0415

    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_S, LIMIT_CPU_S))
    os.setpgid(0, 0)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(written, stream)
    status = 3
    try:
        status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(status)


def _end_of(child: int) -> dict[str, float]:
    """Return the exit status of `child`, minus the signal that ended it, and its CPU seconds."""
    last = time.monotonic() + LIMIT_S
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            cpu_s = used.ru_utime + used.ru_stime
            return {"status": os.waitstatus_to_exitcode(status), "cpu_s": cpu_s}
        if time.monotonic() > last:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    sys.path = [p for p in sys.path if p != str(Path(__file__).parent)]
    main()
