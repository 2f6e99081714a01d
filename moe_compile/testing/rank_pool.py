"""Several ranks as processes of this machine, kept alive between calls.

Contract
    `run` calls one function on every rank and returns their results in rank order; a failure on
    any rank raises here with that rank's traceback; a rank that hangs is ended after the timeout.
    Leaving the context ends every process it started, and no other.
    Pools of several programs may start at once: the system chooses a pool's port while it is bound.
"""

from __future__ import annotations

import datetime
import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist

HOST: Final = "127.0.0.1"
START_TIMEOUT_S: Final = 120.0


def meeting_point() -> dist.TCPStore:
    """Return the store where ranks on this machine meet; it serves as long as it is referred to.

    A port that is looked for first and bound later may be another program's by then.
    """
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


class RankFailure(AssertionError):
    """A function failed on a rank; carries that rank's traceback."""


class RankPool:
    """`num_ranks` processes joined by a gloo group; use as a context manager."""

    def __init__(self, num_ranks: int, *, timeout_s: float = 300.0) -> None:
        """Prepare; processes start on entry. `timeout_s` bounds one call of `run`."""
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._store: dist.TCPStore | None = None

    def __enter__(self) -> RankPool:
        """Start the ranks and wait until they have joined."""
        context = mp.get_context("spawn")
        self._store = meeting_point()
        for rank in range(self.num_ranks):
            here, there = context.Pipe()
            arguments = (rank, self.num_ranks, self._store.port, there, self.timeout_s)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._collect(START_TIMEOUT_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._store = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(rank, *args)` on every rank; it and its results must pickle."""
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._collect(self.timeout_s)

    def _collect(self, timeout_s: float) -> list[Any]:
        """Return all ranks' results; a rank that failed is told before one that hangs for it."""
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        while len(results) < self.num_ranks:
            if time.monotonic() > deadline:
                missing = sorted(set(range(self.num_ranks)) - set(results))
                late = f"ranks {missing} did not answer within {timeout_s} s"
                raise RankFailure(f"{late}\n{_failures(results)}")
            for rank, pipe in enumerate(self._pipes):
                if rank not in results and pipe.poll(0.01):
                    results[rank] = _receive(rank, pipe)
        if failures := _failures(results):
            raise RankFailure(failures)
        return [results[rank][1] for rank in range(self.num_ranks)]


def _failures(results: dict[int, Any]) -> str:
    failed = {r: text for r, (ok, text) in sorted(results.items()) if not ok}
    return "\n".join(f"rank {r}:\n{text}" for r, text in failed.items())


def _receive(rank: int, pipe: Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pipe.recv()
    except EOFError:
        return False, f"process of rank {rank} ended"
    return answer


def _serve(rank: int, num_ranks: int, port: int, pipe: Connection, timeout_s: float) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=timeout_s)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    pipe.send((True, None))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, function(rank, *args)))
        except Exception:  # noqa: BLE001  (whatever it was, the caller is told)
            pipe.send((False, traceback.format_exc()))
    if dist.is_initialized():  # a function may have ended it
        dist.destroy_process_group()
