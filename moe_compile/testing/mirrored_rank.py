"""One real rank and mirror images: rank r does the same with the experts of rank i at rank i ^ r.

Contract
    The number of ranks is a power of two. Another rank sends here what this one sends there, so an
    all-to-all returns its input, and the split sizes received are those sent. A gathered tensor
    holds a part of each rank: this one's, its pieces, of each rank one, in that rank's order. With
    two ranks, the other's part has its halves swapped: counts of experts, rank by rank. With four
    on two nodes, a rank of another place sends the table of two hops (`moe_compile.ops.hop_rows`)
    with the columns of a node's ranks swapped.
    One process computes the results of all ranks at a fraction of the cost. It cannot show ranks
    that differ, nor how ranks agree on what they compiled (`runtime/rank_store.py` knows this
    backend by name).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from moe_compile.testing.process_groups import PythonGroup

BACKEND: Final = "mirrored"


class _Done(dist.Work):
    """Work that is over."""

    def wait(self, timeout: Any = None) -> bool:
        del timeout
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class TableLayout:
    """Layout of a table of two hops between four ranks on two nodes, `[4, ...]` int32."""

    num_experts: int
    """Experts of each rank."""
    num_slices: int
    """Slices asked of hop 1, which runs whole where slices are refused."""

    def swapped(self, table: torch.Tensor) -> torch.Tensor:
        """Return the table of the other ranks, given that of this one."""
        ahead, width = self.num_experts, table.shape[1] // self.num_slices
        divides = table.shape[1] % self.num_slices == 0
        in_slices = divides and width > ahead + 1 and (width - ahead - 1) % 2 == 0
        told = table.view(2, 2, self.num_slices if in_slices else 1, -1).clone()
        of_places = told[:, 1, :, ahead:-1]
        of_places.copy_(of_places.unflatten(2, (-1, 2)).flip(3).flatten(2))
        return told.view_as(table)


class MirroredGroup(PythonGroup):
    """The process group of rank 0 and its mirror images."""

    backend_name = BACKEND

    def __init__(self, num_ranks: int = 2) -> None:
        """Make the group; torch gives it a name."""
        super().__init__(0, num_ranks)
        self.table: TableLayout | None = None

    @torch.compiler.disable
    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any,
    ) -> _Done:
        """Copy the input to the output, which must be as long."""
        del options
        assert not input_splits or list(output_splits) == list(input_splits)
        output.copy_(self._from_others(input))
        return _Done()

    def _from_others(self, sent: torch.Tensor) -> torch.Tensor:
        """Return the tensor that another rank sends here while this one sends `sent`."""
        is_table = sent.dim() == 2 and sent.dtype == torch.int32
        return self.table.swapped(sent) if self.table is not None and is_table else sent

    @torch.compiler.disable
    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> _Done:
        """Write this rank's part and the others': the same pieces, in each rank's order."""
        del options
        pieces, ranks = input.tensor_split(self.size()), range(self.size())
        output.copy_(torch.cat([pieces[i ^ rank] for rank in ranks for i in ranks]))
        return _Done()

    @torch.compiler.disable
    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any
    ) -> _Done:
        """Write this rank's part and the others' into the tensors of each list."""
        for of_ranks, part in zip(outputs, inputs, strict=True):
            gathered = part.new_empty(self.size(), *part.shape)
            self._allgather_base(gathered.flatten(0, 1), part, options)
            for output, own in zip(of_ranks, gathered, strict=True):
                output.copy_(own)
        return _Done()

    @torch.compiler.disable
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> _Done:
        """Do as `_allgather_base`, by the name newer versions of torch call."""
        return self._allgather_base(output, input, options)

    @torch.compiler.disable
    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> _Done:
        """Gather every pair of `outputs` and `inputs`."""
        for output, part in zip(outputs, inputs, strict=True):
            self._allgather_base(output, part, options)
        return _Done()


_KEPT: Final[list[Any]] = []
"""Stores and groups in use: torch holds only the part of them that is not Python's."""


def become_mirrored(num_ranks: int = 2, table: TableLayout | None = None) -> None:
    """Make this process rank 0 of so many, the others its mirror images; ends any group it had.

    `table` is the layout of tables of programs in two hops, from the next program on.
    """
    if not _is_mirrored(num_ranks):
        if dist.is_initialized():
            dist.destroy_process_group()
        _start(num_ranks)
    group = dist.group.WORLD
    assert isinstance(group, MirroredGroup)
    group.table = table


def _is_mirrored(num_ranks: int) -> bool:
    """Whether this process is rank 0 of so many, mirrored."""
    if not dist.is_initialized() or dist.get_backend() != BACKEND:
        return False
    return dist.get_world_size() == num_ranks


def _start(num_ranks: int) -> None:
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu"])
    _KEPT.append(dist.HashStore())
    dist.init_process_group(BACKEND, rank=0, world_size=num_ranks, store=_KEPT[-1])


def _make(store: Any, rank: int, size: int, timeout: Any) -> MirroredGroup:
    del store, rank, timeout
    _KEPT.append(MirroredGroup(size))
    return _KEPT[-1]
