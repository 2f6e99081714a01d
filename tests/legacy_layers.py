"""MoE layers as they are written around `torch.distributed`'s own collectives, and ways to count.

Rows travel by an `autograd.Function` of the program, as in fairscale, DeepSpeed and Megatron-Core;
counts by collectives that write into empty memory.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.layers import GroupedExperts, Routed


class BackwardByItself(torch.autograd.Function):
    """Megatron-Core's: the backward applies the function itself, its split lists swapped."""

    @staticmethod
    def forward(ctx, group, rows, got, sent):
        ctx.group, ctx.got, ctx.sent = group, got, sent
        if dist.get_world_size(group) == 1:
            return rows
        rows = rows.contiguous()
        size = [sum(got), *rows.size()[1:]]
        out = rows.new_empty(size=size, dtype=rows.dtype, device=rows.device)
        dist.all_to_all_single(
            out, rows, output_split_sizes=got, input_split_sizes=sent, group=group
        )
        return out

    @staticmethod
    def backward(ctx, *gradient):
        apply = BackwardByItself.apply
        return None, apply(ctx.group, *gradient, ctx.sent, ctx.got), None, None


def swapped(tensor, got, sent, group):
    out = tensor.new_empty(sum(got), *tensor.shape[1:])
    dist.all_to_all_single(out, tensor.contiguous(), got, sent, group=group)
    return out


class Legacy(Routed):
    """Rows in the router's order, exchanged there and back; what subclasses change is marked."""

    def forward(self, x):
        scores, chosen = self.route(x)
        flat = chosen.reshape(-1)
        order = self.order(flat)
        counts = self.tally(flat)
        received = self.exchange_counts(counts)
        sent, got = self.splits(counts, received)
        out = self.dispatch(x[order // self.top_k], received, got, sent)
        out = out * scores.reshape(-1)[order][:, None].to(out.dtype)
        return torch.zeros_like(x).index_add(0, order // self.top_k, out)

    def order(self, flat):
        return torch.argsort(flat, stable=True)

    def tally(self, flat):
        return F.one_hot(flat, self.num_experts).sum(0)

    def exchange_counts(self, counts):
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        return received

    def dispatch(self, rows, received, got, sent):
        rows = self.exchange(rows, got, sent)
        return self.exchange(self.experts(rows, received), sent, got)

    def exchange(self, rows, got, sent):
        return BackwardByItself.apply(self.group, rows, got, sent)


class Megatron(Legacy, GroupedExperts):
    """Megatron-Core's function, grouped products."""


class Bincount(Megatron):
    """Counts by bincount."""

    def tally(self, flat):
        return torch.bincount(flat, minlength=self.num_experts)


class RepeatedLabels(Megatron):
    """Labels of the received rows by repeat_interleave, their number not said."""

    def expert_of_rows(self, rows, received):
        ids = torch.arange(self.local, device=rows.device).repeat(self.num_ranks)
        return torch.repeat_interleave(ids, received)
