"""Loops over experts as people write them: rows chosen by the expert of each, or by offsets."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.layers import Routed


class Expert(nn.Module):
    """A gated two-layer network, as a module of its own."""

    def __init__(self, width, hidden, rand):
        super().__init__()
        self.gate = nn.Parameter(rand(width, hidden) * width**-0.5)
        self.up = nn.Parameter(rand(width, hidden) * width**-0.5)
        self.down = nn.Parameter(rand(hidden, width) * hidden**-0.5)

    def forward(self, x):
        return (F.silu(x @ self.gate) * (x @ self.up)) @ self.down


class Linear(torch.autograd.Function):
    """A product whose weight gradient is written by hand."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class ListOfExperts(Routed):
    """Experts in an `nn.ModuleList`; `run` puts the rows of each where they came from."""

    expert = Expert

    def make_experts(self, width, hidden, rand):
        self.own = nn.ModuleList(self.expert(width, hidden, rand) for _ in range(self.local))


class WhereAndAdd(ListOfExperts):
    """`torch.where(ids == e)`, results added into zeros: Mixtral's loop in transformers."""

    def experts(self, rows, received):
        ids = self.expert_of_rows(rows, received)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.own):
            (places,) = torch.where(ids == e)
            out.index_add_(0, places, expert(rows[places]))
        return out


class Masked(ListOfExperts):
    """Boolean masks to read and to write: DeepSpeed's and many teaching codes' loop."""

    def experts(self, rows, received):
        ids = self.expert_of_rows(rows, received)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.own):
            mask = ids == e
            out[mask] = expert(rows[mask])
        return out


class ScatteredColumn(ListOfExperts):
    """The column that `nonzero` gives, expanded, and memory that nothing filled."""

    def experts(self, rows, received):
        ids = self.expert_of_rows(rows, received)
        out = torch.empty_like(rows)
        for e, expert in enumerate(self.own):
            where = torch.nonzero(ids == e).expand(-1, rows.shape[1])
            out.scatter_(0, where, expert(rows.gather(0, where)))
        return out


class Runs(ListOfExperts):
    """What loops by offsets share: the host knows every count."""

    def splits(self, counts, received):
        self._runs = received.tolist()
        sent = counts.view(self.num_ranks, -1).sum(1).tolist()
        e = self.local
        return sent, [sum(self._runs[r * e : (r + 1) * e]) for r in range(self.num_ranks)]

    def runs(self):
        """Return the expert, the first row and the last but one of every run."""
        runs, self._runs = self._runs, None
        ends = list(itertools.accumulate(runs))
        starts = [0, *ends[:-1]]
        return [(i % self.local, a, b) for i, (a, b) in enumerate(zip(starts, ends, strict=True))]


class SlicesAssigned(Runs):
    """`out[a:b] = expert(rows[a:b])`, run by run."""

    def experts(self, rows, received):
        out = torch.zeros_like(rows)
        for e, a, b in self.runs():
            out[a:b] = self.own[e](rows[a:b])
        return out


class SlicesJoined(Runs):
    """A list of results, concatenated."""

    def experts(self, rows, received):
        return torch.cat([self.own[e](rows[a:b]) for e, a, b in self.runs()])


class CheckpointedLoop(Runs):
    """`checkpoint` around the whole loop."""

    def experts(self, rows, received):
        return checkpoint(self.loop, rows, self.runs(), use_reentrant=False)

    def loop(self, rows, runs):
        return torch.cat([self.own[e](rows[a:b]) for e, a, b in runs])


class CenteredExperts(Masked):
    """An expert that takes the mean over its own rows: not row by row, but of one expert."""

    class expert(Expert):
        def forward(self, x):
            y = super().forward(x)
            return y - y.mean(0)


class ChannelAttention(SlicesJoined):
    """Channels attend to each other by all rows of one run: a step of it has no rows at all."""

    class expert(Expert):
        def forward(self, x):
            return super().forward(x) @ torch.softmax(x.t() @ x, -1)


LOOPS = (
    WhereAndAdd, Masked, ScatteredColumn, SlicesAssigned, SlicesJoined, CheckpointedLoop,
    CenteredExperts, ChannelAttention,
)  # fmt: skip
