"""Experts in torchtitan's form: groups padded to multiples of 8 rows, found without a host read."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.layers import Routed
from torchtitan_integration.cpu_launcher import generate_permute_indices


class PaddedGroups(Routed):
    """Rows are gathered into padded groups by an index with -1 for padding, and written back."""

    ALIGN = 8

    def indices(self, rows, received):
        longest = rows.shape[0] + self.local * self.ALIGN
        longest = (longest + self.ALIGN - 1) // self.ALIGN * self.ALIGN
        return generate_permute_indices(received, self.local, self.num_ranks, longest, self.ALIGN)

    def read(self, indices, offs):
        """Return the rows that stand in the groups, and behind them."""
        return indices

    def between(self, h):
        return h

    def experts(self, rows, received):
        with torch.no_grad():
            indices, _, offs = self.indices(rows, received)
        padded = torch.vstack((rows, rows.new_zeros(rows.shape[-1])))
        x = padded[self.read(indices, offs), :]
        gate = F.silu(torch._grouped_mm(x, self.w1, offs=offs))
        h = self.between(gate * torch._grouped_mm(x, self.w3, offs=offs))
        out = torch._grouped_mm(h, self.w2, offs=offs)
        back = out.new_empty(padded.shape)
        back[indices, :] = out
        return back[:-1]


class MeanOfRows(PaddedGroups):
    """Subtracts from every row the mean of all: rows behind those of the counts would count."""

    def experts(self, rows, received):
        return super().experts(rows - rows.mean(0), received)


class TwoLayers(torch.nn.Module):
    """Two layers, one behind the other."""

    def __init__(self, *sizes):
        super().__init__()
        self.first, self.second = PaddedGroups(*sizes), PaddedGroups(*sizes)

    def forward(self, x):
        return self.second(x + self.first(x))


class Checkpointed(PaddedGroups):
    """A layer that the backward pass runs again."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)
