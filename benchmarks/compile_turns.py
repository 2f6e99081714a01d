"""Rank 0 compiles first, so that the other ranks find its results in the cache.

Contract
    On rank 0 the body of `turn` starts at once; on the others when rank 0's body has compiled a
    graph or ended. Forward and backward are compiled by the first call, so that one turn suffices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch._dynamo
import torch._functorch.config
import torch.distributed as dist
from torch._dynamo.callback import callback_handler

POLL_S: Final = 0.05


class CompileTurns:
    """One per rank; `folder` is empty at first and seen by all ranks."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        """Prepare; `timeout_s` bounds the wait for rank 0."""
        self._folder = folder
        self._timeout_s = timeout_s
        self._num_turns = 0
        self.seconds = 0.0
        """Of this rank's compilations in the current or last turn, Dynamo's part included."""
        self._began = 0.0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Compile in the body."""
        self._num_turns += 1
        self.seconds = 0.0
        flag = self._folder / f"turn{self._num_turns}"
        if dist.get_rank() != 0:
            self._wait_for(flag)

        def began(_: Any) -> None:
            self._began = time.monotonic()

        def ended(_: Any) -> None:
            self.seconds += time.monotonic() - self._began
            flag.touch()

        callback_handler.register_start_callback(began)
        callback_handler.register_end_callback(ended)
        try:
            with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                yield
        finally:
            callback_handler.remove_start_callback(began)
            callback_handler.remove_end_callback(ended)
            flag.touch()

    def _wait_for(self, flag: Path) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not flag.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 did not finish compiling")
            time.sleep(POLL_S)
