"""MoE layers as they are written around `torch.distributed`'s own collectives, and ways to count.

Rows travel by an `autograd.Function` of the program, as in fairscale, DeepSpeed and Megatron-Core;
counts by collectives that write into empty memory.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.layers import GroupedExperts, LoopExperts, Routed


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


class WrittenTwice(torch.autograd.Function):
    """Both directions written out; the backward's memory is shaped like a saved tensor."""

    @staticmethod
    def forward(ctx, rows, got, sent, group):
        assert sum(sent) == rows.shape[0]
        ctx.save_for_backward(rows)
        ctx.splits, ctx.group = (got, sent), group
        out = torch.empty((sum(got), rows.shape[1]), dtype=rows.dtype, device=rows.device)
        dist.all_to_all_single(out, rows.contiguous(), got, sent, group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (rows,), (got, sent) = ctx.saved_tensors, ctx.splits
        out = torch.zeros_like(rows)
        dist.all_to_all_single(out, gradient.contiguous(), sent, got, group=ctx.group)
        return out, None, None, None


class TwoAtOnce(torch.autograd.Function):
    """Rows and the scores that belong to them, both ways."""

    @staticmethod
    def forward(ctx, rows, scores, got, sent, group):
        ctx.splits, ctx.group = (got, sent), group
        return tuple(swapped(tensor, got, sent, group) for tensor in (rows, scores))

    @staticmethod
    def backward(ctx, of_rows, of_scores):
        got, sent = ctx.splits
        return *(swapped(g, sent, got, ctx.group) for g in (of_rows, of_scores)), None, None, None


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


class DeepSpeed(Legacy, LoopExperts):
    """A function written out both ways, a loop over experts, ones added to zeros in place."""

    def tally(self, flat):
        counts = torch.zeros(self.num_experts, dtype=torch.int32)
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=counts.dtype))
        return counts

    def exchange(self, rows, got, sent):
        return WrittenTwice.apply(rows, got, sent, self.group)


class GatheredByLegacy(Megatron):
    """Counts of all ranks by all_gather_into_tensor, made by histc."""

    def tally(self, flat):
        last = self.num_experts
        return torch.histc(flat.float(), bins=last, min=0, max=last).long()

    def exchange_counts(self, counts):
        everyone = counts.new_empty(self.num_ranks * self.num_experts)
        dist.all_gather_into_tensor(everyone, counts, group=self.group)
        mine = dist.get_rank(self.group) * self.local
        return everyone.view(self.num_ranks, -1)[:, mine : mine + self.local].reshape(-1)


class GatheredAsList(GatheredByLegacy):
    """Counts of all ranks by all_gather into a list."""

    def exchange_counts(self, counts):
        parts = [torch.empty_like(counts) for _ in range(self.num_ranks)]
        dist.all_gather(parts, counts, group=self.group)
        mine = dist.get_rank(self.group) * self.local
        return torch.cat([part[mine : mine + self.local] for part in parts])


class Bincount(Megatron):
    """Counts by bincount."""

    def tally(self, flat):
        return torch.bincount(flat, minlength=self.num_experts)


class BincountCut(Bincount):
    """Counts by bincount, cut to the number of experts."""

    def tally(self, flat):
        return super().tally(flat)[: self.num_experts]


class BincountViewed(Megatron):
    """Counts by bincount, whose length a view says."""

    def tally(self, flat):
        counts = torch.bincount(flat, minlength=self.num_experts)
        return counts.view(self.num_ranks, self.local).reshape(-1)


class Unique(Megatron):
    """Counts of those experts that were chosen at all, by unique."""

    def tally(self, flat):
        experts, counts = torch.unique(flat, return_counts=True)
        return flat.new_zeros(self.num_experts).index_put((experts,), counts)


class WherePerExpert(Megatron):
    """Rows found expert by expert."""

    def order(self, flat):
        return torch.cat([torch.where(flat == e)[0] for e in range(self.num_experts)])


class MaskedSelect(Megatron):
    """Megatron-Core's routing map: rows selected by a mask of experts and tokens."""

    def order(self, flat):
        mask = F.one_hot(flat, self.num_experts).bool().T
        places = torch.arange(flat.shape[0]).expand(self.num_experts, -1)
        return places.masked_select(mask)


class RepeatedLabels(Megatron):
    """Labels of the received rows by repeat_interleave, their number not said."""

    def expert_of_rows(self, rows, received):
        ids = torch.arange(self.local, device=rows.device).repeat(self.num_ranks)
        return torch.repeat_interleave(ids, received)


class ScoresTravel(Megatron):
    """Scores travel with the rows, in one function."""

    def forward(self, x):
        scores, chosen = self.route(x)
        flat = chosen.reshape(-1)
        order = self.order(flat)
        counts = self.tally(flat)
        received = self.exchange_counts(counts)
        sent, got = self.splits(counts, received)
        weights = scores.reshape(-1)[order][:, None].to(x.dtype)
        rows, weights = TwoAtOnce.apply(x[order // self.top_k], weights, got, sent, self.group)
        out = self.exchange(self.experts(rows, received) * weights, sent, got)
        return torch.zeros_like(x).index_add(0, order // self.top_k, out)


class OwnActivation(torch.autograd.Function):
    """SwiGLU's two halves, its derivative written by hand."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        return gradient * up * slope, gradient * F.silu(gate)


class HandwrittenActivation(Megatron):
    """An activation that is an autograd.Function, between grouped products."""

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        x = rows[perm]
        gate = torch._grouped_mm(x, self.w1, offs=offs)
        h = OwnActivation.apply(gate, torch._grouped_mm(x, self.w3, offs=offs))
        out = torch._grouped_mm(h, self.w2, offs=offs)
        return torch.zeros_like(out).index_copy(0, perm, out)


class WithoutGradients(Legacy, GroupedExperts):
    """Rows by all_to_all_single into empty memory, which carries no gradient: for inference."""

    def exchange(self, rows, got, sent):
        return swapped(rows, got, sent, self.group)
