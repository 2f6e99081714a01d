"""Functions that run in copies of this process, beside what it goes on to do.

Contract
    A copy sees all that this process had when they began, graphs and modes included, and changes
    nothing here: its result alone comes back. It ends with this process, however that ends.
    They run here, one after another, when results are asked for: on one CPU; on other systems than
    Linux; in a daemonic process, which may have no children; and where a GPU is there, for which
    autograd has threads that no copy has.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final

import torch

from torchtitan_integration.parent_death import with_parent

_TASKS: Final[list[Callable[[], Any]]] = []
"""What copies of this process find in it: graphs cannot be sent to them."""


@contextlib.contextmanager
def beside(tasks: Sequence[Callable[[], Any]]) -> Iterator[Callable[[], list[Any]]]:
    """Begin `tasks`, and give a function that waits for their results, in order.

    A task's exception is raised by that function.
    """
    is_daemonic = multiprocessing.current_process().daemon
    is_safe = sys.platform == "linux" and not torch.accelerator.is_available() and not is_daemonic
    cpus = len(os.sched_getaffinity(0)) if is_safe else 1
    if min(cpus, len(tasks)) < 2:
        yield lambda: [task() for task in tasks]
        return
    _TASKS[:] = tasks
    context = multiprocessing.get_context("fork")
    ends = with_parent(signal.SIGKILL)
    with ProcessPoolExecutor(min(cpus, len(tasks)), context, initializer=ends) as pool:
        futures = [pool.submit(_run, number) for number in range(len(tasks))]
        try:
            yield lambda: [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            _TASKS.clear()


def _run(number: int) -> Any:
    return _TASKS[number]()
