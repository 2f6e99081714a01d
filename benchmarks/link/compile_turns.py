"""Rank 0 compiles first, so that the other ranks find its results in the cache.

Contract
    On rank 0 the body of `turn` starts at once; on the others when rank 0's body has compiled a
    graph or ended. Forward and backward are compiled by the first call, so that one turn suffices.
    Every turn has a cache folder of its own: no turn is quick because an earlier one compiled the
    same kernels, and a later run of the same turn finds everything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch._dynamo
import torch._functorch.config
import torch.distributed as dist
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

POLL_S: Final = 0.05


class CompileTurns:
    """One per rank; `folder` is empty at first and seen by all ranks."""

    def __init__(self, folder: Path, cache: Path, timeout_s: float) -> None:
        """Prepare; caches lie in `cache`, `timeout_s` bounds the wait for rank 0."""
        self._folder, self._cache = folder, cache
        self._timeout_s = timeout_s
        self._num_turns = 0
        self.seconds = 0.0
        """Of this rank's compilations in the current or last turn, Dynamo's part included."""
        self.is_from_cache = False
        """Whether Inductor found compiled graphs of the current or last turn in its cache."""
        self._began = 0.0

    def start_compiler(self) -> None:
        """Compile something small, so that the first turn does not pay for imports and probes."""
        with self.turn("start"):
            torch.compile(lambda x: x + 1)(torch.zeros(8))

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Compile in the body, with the cache called `name`."""
        self._num_turns += 1
        self.seconds = 0.0
        hits = _cache_hits()
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
            with (
                torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
                temporary_cache_dir(str(self._cache / name.replace(" ", "_"))),
            ):
                yield
        finally:
            callback_handler.remove_start_callback(began)
            callback_handler.remove_end_callback(ended)
            flag.touch()
            self.is_from_cache = _cache_hits() > hits

    def _wait_for(self, flag: Path) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not flag.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 did not finish compiling")
            time.sleep(POLL_S)


def _cache_hits() -> int:
    """Return how many compiled graphs this process took from caches so far."""
    return (
        counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    )
