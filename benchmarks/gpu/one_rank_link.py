"""A process group of one rank whose all-to-alls travel over a lane beside compute (lanes.py)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.lanes import CudaLane, Exchange, ProcessorLane
from moe_compile.testing.process_groups import PythonGroup, new_group_of

Lane = CudaLane | ProcessorLane


class OneRankLink(PythonGroup):
    """Functional collectives and generated code use it as any other group."""

    backend_name = "lane"

    def __init__(self, lane: Lane) -> None:
        """Carry exchanges over `lane`."""
        super().__init__(0, 1)
        self._lane = lane

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any,
    ) -> dist.Work:
        """Launch one exchange; one rank keeps all it sends, so splits say nothing new."""
        del output_splits, input_splits, options
        return _LaneWork(self._lane, self._lane.launch(output, input))


class _LaneWork(dist.Work):
    """What a launch returns; keeps the tensors until someone waited for them."""

    def __init__(self, lane: Lane, exchange: Exchange) -> None:
        super().__init__()
        self._lane = lane
        self._exchange: Exchange | None = exchange

    def wait(self, timeout: Any = None) -> bool:
        del timeout  # a lane always ends
        if self._exchange is not None:
            self._lane.wait(self._exchange)
            self._exchange = None
        return True


def one_rank_link(device: str, lane: Lane) -> OneRankLink:
    """Return the group; the default group, of one rank too, must exist."""
    return new_group_of(OneRankLink, lambda *_: OneRankLink(lane), [device])
