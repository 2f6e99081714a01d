"""Two ranks of which one exists: the other does the same with the two ranks' experts swapped.

Contract
    What the other rank sends here is what this one sends there, so an all-to-all gives back what
    was put in, and split sizes received are those sent. A gathered tensor holds this rank's part,
    then the same with its halves swapped: counts of experts, rank by rank.
    One process computes what two would, at half the cost; ranks that differ it cannot show, nor
    how ranks agree on what they compiled (`runtime/rank_store.py` knows this backend by name).
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist

BACKEND: Final = "mirrored"


class _Done(dist.Work):
    """Work that is over."""

    def wait(self, timeout: Any = None) -> bool:
        del timeout
        return True


class MirroredGroup(dist.ProcessGroup):
    """The process group of rank 0 and its mirror image."""

    def __init__(self) -> None:
        """Make the group; torch gives it a name."""
        super().__init__(0, 2)
        self._name = ""

    def getBackendName(self) -> str:
        """Return the name torch knows this group's backend by."""
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """Name functional collectives find this group by."""
        return self._name

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any,
    ) -> _Done:
        """Give back what was put in, which must be as long as what is expected."""
        del options
        assert not input_splits or list(output_splits) == list(input_splits)
        output.copy_(input)
        return _Done()

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> _Done:
        """Write this rank's part and the other's: the same with its halves swapped."""
        del options
        half = len(input) // 2
        output.copy_(torch.cat([input, input[half:], input[:half]]))
        return _Done()

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any
    ) -> _Done:
        """Write this rank's part and the other's into the tensors of each list."""
        for (own, other), part in zip(outputs, inputs, strict=True):
            both = part.new_empty(2 * len(part), *part.shape[1:])
            self._allgather_base(both, part, options)
            own.copy_(both[: len(part)])
            other.copy_(both[len(part) :])
        return _Done()

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> _Done:
        """Do as `_allgather_base`, by the name newer versions of torch call."""
        return self._allgather_base(output, input, options)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> _Done:
        """Gather every pair of `outputs` and `inputs`."""
        for output, part in zip(outputs, inputs, strict=True):
            self._allgather_base(output, part, options)
        return _Done()


_KEPT: Final[list[Any]] = []
"""Stores and groups in use: torch holds only the part of them that is not Python's."""


def become_mirrored() -> None:
    """Make this process rank 0 of two, the other its mirror image; ends any group it had."""
    if dist.is_initialized():
        if dist.get_backend() == BACKEND:
            return
        dist.destroy_process_group()
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu"])
    _KEPT.append(dist.HashStore())
    dist.init_process_group(BACKEND, rank=0, world_size=2, store=_KEPT[-1])


def _make(store: Any, rank: int, size: int, timeout: Any) -> MirroredGroup:
    del store, rank, size, timeout
    _KEPT.append(MirroredGroup())
    return _KEPT[-1]
