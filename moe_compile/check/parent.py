"""Have a process end with the one that started it.

Contract
    A process ends with its parent, also where the parent was killed without notice: ranks have
    sessions of their own, and would go on.
    Linux alone has the means (prctl); elsewhere nothing happens.
    Counts from the parent's thread that started the process: start it from a thread that stays.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Any, Final

PR_SET_PDEATHSIG: Final = 1
"""From linux/prctl.h: the signal that a process gets when its parent ends."""


def with_parent(number: signal.Signals) -> Callable[[], None]:
    """Return a function that a child runs first, to get `number` when this process ends."""
    prctl, parent = _prctl(), os.getpid()

    def bind() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, int(number))
            if os.getppid() != parent:  # it ended before the call
                os.kill(os.getpid(), number)

    return bind


def end_with_parent() -> None:
    """Have this process killed when its parent ends."""
    if (prctl := _prctl()) is not None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _prctl() -> Any:
    try:
        return ctypes.CDLL(None).prctl
    except (AttributeError, OSError, TypeError):
        return None
