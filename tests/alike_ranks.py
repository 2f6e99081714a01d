"""A group of ranks that all hold the same, of which only one exists, and what it sends to others.

Collectives are computed, not skipped: what each other rank would send is what this one has. So
programs whose sizes depend on what they receive run, on any number of ranks.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers "fake")

from moe_compile.testing.process_groups import PythonGroup, new_group_of


@dataclass(frozen=True)
class Sent:
    """What this rank sent in one collective; elements to all the others together."""

    kind: str
    dtype: torch.dtype
    shape: torch.Size
    """Of what this rank put in."""
    elements: int

    @property
    def bytes(self):
        return self.elements * self.dtype.itemsize


class AlikeStore(dist.Store):
    """What this rank writes under its number every other rank wrote under its own."""

    def __init__(self):
        super().__init__()
        self.values = {}

    def set(self, key, value):
        self.values[key.rpartition("/")[0]] = value

    def get(self, key):
        return self.values[key.rpartition("/")[0]]

    def wait(self, keys, timeout=None):
        assert all(key.rpartition("/")[0] in self.values for key in keys)


class Done(dist.Work):
    def wait(self, timeout=None):
        return True


class AlikeRanks(PythonGroup):
    """Rank 0 of `size` alike."""

    backend_name = "alike"

    def __init__(self, size):
        super().__init__(0, size)
        self.log = []

    def alltoall_base(self, output, input, output_splits, input_splits, options):
        splits = input_splits or [len(input) // self.size()] * self.size()
        for_me = input.split(splits)[0]
        assert not output_splits or output_splits == [len(for_me)] * self.size()
        output.copy_(for_me.repeat(self.size(), *[1] * (input.dim() - 1)))
        return self._sent("all_to_all", input, input.numel() - for_me.numel())

    def allgather_into_tensor_coalesced(self, outputs, inputs, options):
        (output,), (input,) = outputs, inputs
        output.copy_(input.repeat(self.size(), *[1] * (input.dim() - 1)))
        return self._sent("all_gather", input, input.numel() * (self.size() - 1))

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, options):
        (output,), (input,) = outputs, inputs
        output.copy_(input[: len(output)] * self.size())
        return self._sent("reduce_scatter", input, input.numel() - output.numel())

    def _sent(self, kind, tensor, elements):
        self.log.append(Sent(kind, tensor.dtype, tensor.shape, elements))
        return Done()


@contextmanager
def alike_ranks(size):
    store = AlikeStore()  # to be kept: torch holds only the part of it that is not Python's
    dist.init_process_group("fake", rank=0, world_size=size, store=store)
    try:
        yield new_group_of(AlikeRanks, lambda *_: AlikeRanks(size), ["cpu"])
    finally:
        dist.destroy_process_group()
