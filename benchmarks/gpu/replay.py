"""Device work that is launched again and again, and its times.

Contract
    `replayable` work is launched as one CUDA graph, so that gaps between launches do not count.
    Jobs are timed in turn, in an order that rotates: what slows a whole round slows all alike.
    Outputs of replayed work are kept: they can be poisoned, made again and checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from moe_compile.hardware.measure import elapsed_s, synchronize

Work = Callable[[], Any]

WARM_UP: Final = 3
HEAD_START_CYCLES: Final = 200_000
"""About a tenth of a millisecond: launching one graph takes the host less."""
POISON: Final = 0xFF
"""Byte written over outputs: NaN in every float format we use, -1 in integers."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Work that can be launched again, and the tensors its last launch wrote."""

    launch: Work
    outputs: list[torch.Tensor]

    def fresh_outputs(self) -> list[torch.Tensor]:
        """Launch once more over poisoned outputs and return them."""
        for output in self.outputs:
            poison(output)
        self.launch()
        return self.outputs


def poison(tensor: torch.Tensor) -> None:
    """Overwrite a contiguous tensor with bytes no right result has."""
    tensor.view(-1).view(torch.uint8).fill_(POISON)


def replayable(device: str, work: Callable[[], list[torch.Tensor]]) -> Replay:
    """Return `work` as one launch; it must return every tensor it wrote."""
    if device != "cuda":
        return _ProcessorReplay(work).replay
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work()
    return Replay(graph.replay, outputs)


class _ProcessorReplay:
    """Without graphs: every launch makes its tensors anew, into the same list."""

    def __init__(self, work: Callable[[], list[torch.Tensor]]) -> None:
        self._work = work
        self.replay = Replay(self._launch, work())

    def _launch(self) -> None:
        self.replay.outputs[:] = self._work()


def time_in_turn(device: str, jobs: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
    """Return seconds of every job, one entry per round; each job is warm when the rounds begin."""
    for work in jobs.values():
        for _ in range(WARM_UP):
            work()
    synchronize(device)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    names = list(jobs)
    for _ in range(rounds):
        names = [*names[1:], names[0]]
        for name in names:
            times[name].append(elapsed_s(device, jobs[name], HEAD_START_CYCLES))
    return times
