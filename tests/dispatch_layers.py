"""Layers that differ in what stands around the exchanges: the gather before, the sum after."""

import torch
import torch.distributed as dist

from tests.layers import GroupedExperts


class Around(GroupedExperts):
    """GroupedExperts, with what stands around the region to be overridden."""

    def forward(self, x):
        scores, chosen = self.route(x)
        flat = self.own(chosen).reshape(-1)
        order = self.among_all(self.by_expert(flat), x)
        counts = (flat[:, None] == torch.arange(self.num_experts, device=x.device)).sum(0)
        received = self.exchange_counts(counts)
        sent_rows, got_rows = self.splits(counts, received)
        rows = self.gather(x, order, scores)
        rows = self.exchange(rows, got_rows, sent_rows)
        out = self.exchange(self.experts(rows, received), sent_rows, got_rows)
        return self.total(x, order, out, scores)

    def own(self, chosen):
        """Return the experts of the tokens whose rows this rank sends."""
        return chosen

    def among_all(self, order, x):
        """Return numbers of these rows among those of all tokens."""
        return order

    def by_expert(self, flat):
        return torch.argsort(flat, stable=True)

    def exchange(self, rows, out_sizes, in_sizes):
        launch = torch.ops._c10d_functional.all_to_all_single(
            rows, out_sizes, in_sizes, self.group.group_name
        )
        return torch.ops._c10d_functional.wait_tensor(launch)

    def gather(self, x, order, scores):
        return x[order // self.top_k]

    def total(self, x, order, out, scores):
        weights = scores.reshape(-1)[order][:, None].to(out.dtype)
        return torch.zeros_like(x).index_add(0, order // self.top_k, out * weights)


class Unweighted(Around):
    """Tokens' rows are added up as they come."""

    def total(self, x, order, out, scores):
        return torch.zeros_like(x).index_add(0, order // self.top_k, out)


class InOrder(Around):
    """torchtitan's form: rows are weighted before they are sent, put in order, and summed."""

    def gather(self, x, order, scores):
        weights = scores.reshape(-1)[order].reshape(-1, 1)
        return (super().gather(x, order, scores).float() * weights).to(x.dtype)

    def total(self, x, order, out, scores):
        size = (x.shape[0] * self.top_k, x.shape[1])
        ordered = torch.zeros(size, dtype=x.dtype, device=x.device)
        ordered[order] = out
        return self.summed(ordered.reshape(-1, self.top_k, x.shape[1]), scores).to(x.dtype)

    def summed(self, by_token, scores):
        return by_token.sum(dim=1)


class InOrderWeighted(InOrder):
    """The same with weights after the experts, in float32, by a batched product."""

    def gather(self, x, order, scores):
        return x[order // self.top_k]

    def summed(self, by_token, scores):
        weights = scores.reshape(-1, 1, self.top_k)
        return torch.bmm(weights, by_token.float()).to(by_token.dtype).squeeze(1)


class IntoEmpty(Around):
    """DeepSeek's form: rows are put in order in memory that nobody filled, then weighted."""

    def total(self, x, order, out, scores):
        new = torch.empty_like(out)
        new[order] = out
        by_token = new.view(*scores.shape, -1).type(scores.dtype)
        return by_token.mul_(scores.unsqueeze(-1)).sum(dim=1).type(new.dtype)


class WeightedInOrder(Around):
    """Rows are weighted where they are put in order, before they are viewed by token."""

    def total(self, x, order, out, scores):
        new = torch.zeros_like(out)
        new[order, :] = out
        new = new.to(scores.dtype) * scores.reshape(-1, 1)
        return new.view(-1, self.top_k, x.shape[1]).sum(1).to(out.dtype)


class ByInverse(Around):
    """Rows are put in order by the order's inverse."""

    def total(self, x, order, out, scores):
        by_token = out[torch.argsort(order)].view(len(x), self.top_k, x.shape[1])
        return (by_token.to(scores.dtype) * scores[..., None]).sum(1).to(out.dtype)


class InColumns(Around):
    """Rows are gathered and added up by their number in every column, as torchtitan did."""

    def gather(self, x, order, scores):
        return torch.gather(x, dim=0, index=self.in_columns(order, x))

    def total(self, x, order, out, scores):
        weights = scores.reshape(-1)[order][:, None].to(out.dtype)
        index = self.in_columns(order, x)
        return torch.zeros_like(x).scatter_add(dim=0, index=index, src=out * weights)

    def in_columns(self, order, x):
        return (order // self.top_k).reshape(-1, 1).expand(-1, x.shape[1])


class ByEinsum(Around):
    """Rows are copied in order into memory that nobody filled; an einsum weighs and sums them."""

    def total(self, x, order, out, scores):
        new = out.new_empty(out.shape)
        new.index_copy_(0, order, out)
        by_token = new.view(len(x), self.top_k, x.shape[1])
        return torch.einsum("tkd,tk->td", by_token, scores.to(out.dtype))


class AddedInPlace(Around):
    """Rows are added to zeros in place."""

    def total(self, x, order, out, scores):
        sums = torch.zeros_like(x)
        sums.index_add_(0, order // self.top_k, out * scores.reshape(-1)[order, None].to(out.dtype))
        return sums.to(x.dtype)


class OntoZeros(Around):
    """Adds the rows to zeros whose sizes are written, and not those of another tensor."""

    def total(self, x, order, out, scores):
        weights = scores.reshape(-1)[order][:, None].to(out.dtype)
        base = self.zeros(x)
        return base.index_add(0, order // self.top_k, out * weights)

    def zeros(self, x):
        return torch.zeros(x.shape[0], x.shape[1], dtype=x.dtype, device=x.device)


class OntoNewZeros(OntoZeros):
    """The same of the type of another tensor."""

    def zeros(self, x):
        return x.new_zeros(x.shape[0], x.shape[1])


class WeighedByIndex(Around):
    """Rows get the scores that an operator takes by index: as many as there are, torch infers."""

    def total(self, x, order, out, scores):
        weights = torch.index_select(scores.reshape(-1), 0, order).view(-1, 1).to(out.dtype)
        return torch.zeros_like(x).index_add(0, order // self.top_k, out * weights)


class OfWrittenLength(Around):
    """The order of rows is told how many there are: of a part there are fewer."""

    def by_expert(self, flat):
        return super().by_expert(flat).view(flat.shape[0])


class OneOrAll(WeighedByIndex):
    """What comes back is as many rows as were sent, or one: torch itself asserts that of sums."""

    def total(self, x, order, out, scores):
        torch._check((out.shape[0] == 1) | (out.shape[0] == order.shape[0]))
        return super().total(x, order, out, scores)


class OntoTokens(Around):
    """Adds the rows to what stands there already."""

    def total(self, x, order, out, scores):
        weights = scores.reshape(-1)[order][:, None].to(out.dtype)
        return (x * 2).index_add(0, order // self.top_k, out * weights)


class SharedOut:
    """Ranks have tokens in pairs, and each sends the rows of one half: torchtitan's form under
    tensor parallelism."""

    def first(self, tokens):
        return dist.get_rank(self.group) % 2 * (tokens.shape[0] // 2)

    def own(self, chosen):
        first = self.first(chosen)
        return chosen[first : first + chosen.shape[0] // 2]

    def among_all(self, order, x):
        return order + self.first(x) * self.top_k


class SharedInOrder(SharedOut, InOrder):
    pass


class SharedInOrderWeighted(SharedOut, InOrderWeighted):
    pass


class SharedByIndex(SharedOut, Around):
    pass
