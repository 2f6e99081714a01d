"""Rows come back in the order received, and each group of rows belongs to one expert."""

import pytest
import torch
import torch.nn.functional as F

from moe_compile.journal.reasons import Reason
from moe_compile.regions.regions import RowProof
from tests.layers import GroupedExperts
from tests.proof.verdicts import EXPERTS, HIDDEN, LOCAL, TOP_K, WIDTH, judge, layer_of, tokens


class Ordered(GroupedExperts):
    """Experts written as a function `body(layer, rows, received)`."""

    body = None

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("table", torch.arange(EXPERTS))
        self.register_buffer("frozen", torch.ones(WIDTH, dtype=self.w1.dtype))

    def experts(self, rows, received):
        return self.body(self, rows, received)

    def totals(self, received):
        return received.view(self.num_ranks, -1).sum(0)

    def perm(self, rows, received, stable=True):
        return torch.argsort(self.expert_of_rows(rows, received), stable=stable)

    def searched(self, rows, received):
        """Return the same permutation, computed in a way that is not followed."""
        runs = torch.searchsorted(received.cumsum(0), torch.arange(rows.shape[0]), right=True)
        return torch.argsort(runs % self.local, stable=True)

    def product(self, rows, totals):
        return torch._grouped_mm(rows, self.w1 @ self.w2, offs=totals.cumsum(0).int())

    def each(self, parts):
        return [(part @ self.w1[e]) @ self.w2[e] for e, part in enumerate(parts)]


def put_back(index, rows):
    return torch.zeros_like(rows).index_copy(0, index, rows)


def verdict_on(body, group, dtype=torch.bfloat16):
    style = type("Written", (Ordered,), {"body": staticmethod(body)})
    return judge(layer_of(style, group, dtype), tokens(dtype))


def padded_batch(m, x, c):
    perm = m.perm(x, c)
    y = m.product(F.pad(x[perm], (0, 0, 0, 8)), m.totals(c))
    return put_back(perm, y[:-8])


def sliced_loop(m, x, c):
    perm, ends = m.perm(x, c), m.totals(c).cumsum(0).tolist()
    rows = x[perm]
    parts = [rows[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    return put_back(perm, torch.cat(m.each(parts)))


def narrowed_loop(m, x, c):
    perm, start, parts = m.perm(x, c), 0, []
    rows = x[perm]
    for size in m.totals(c).tolist():
        parts.append(rows.narrow(0, start, size))
        start = start + size
    return put_back(perm, torch.cat(m.each(parts)))


def bias_by_permuted_ids(m, x, c):
    perm = m.perm(x, c)
    y = m.product(x[perm], m.totals(c)) + m.w2[:, 0][m.expert_of_rows(x, c)[perm]]
    return put_back(perm, y)


def bias_repeated(m, x, c):
    perm = m.perm(x, c)
    totals = m.totals(c)
    bias = torch.repeat_interleave(m.w2[:, 0], totals, 0, output_size=x.shape[0])
    return put_back(perm, m.product(x[perm], totals) + bias)


def constant_per_expert(m, x, c):
    gains = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype)
    return x * gains[m.expert_of_rows(x, c)][:, None]


def masked_by_labels(m, x, c):
    """Rows of experts above the last are none: transformers masks what it received so."""
    labels, perm = torch.sort(m.expert_of_rows(x, c), stable=True)
    mask = (labels >= m.local - 1)[:, None]
    rows = x[perm]
    rows.masked_fill_(mask, 0.5)
    return put_back(perm, m.product(rows, m.totals(c)).masked_fill(mask, 0.0))


def tables_of_labels(m, x, c):
    hot = F.one_hot(m.expert_of_rows(x, c), m.local)
    return x * hot[:, 1, None]


def counted_by_histc(bins, most):
    """Return experts whose groups are counted from labels: transformers counts so."""

    def body(m, x, c):
        labels, perm = torch.sort(m.expert_of_rows(x, c), stable=True)
        counts = torch.histc(labels.float(), bins=bins, min=0, max=most)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)[-m.local :]
        return put_back(perm, torch._grouped_mm(x[perm], m.w1 @ m.w2, offs=ends))

    return body


def by_pieces(order):
    """Return experts whose rows are sorted by pieces of numbers from 0 on, in `order`."""

    def body(m, x, c):
        places = torch.arange(x.shape[0]).split(c.tolist())
        perm = torch.cat([places[i] for i in order(m)])
        return put_back(perm, m.product(x[perm], m.totals(c)))

    return body


def by_expert(m):
    return [r * m.local + e for e in range(m.local) for r in range(m.num_ranks)]


PROVEN = {
    "pieces of numbers from 0 on": by_pieces(by_expert),
    "labels counted by a histogram": counted_by_histc(LOCAL, LOCAL - 1),
    "labels counted by a histogram up to their number": counted_by_histc(LOCAL, LOCAL),
    "masks of labels": masked_by_labels,
    "scales of tables of labels": tables_of_labels,
    "padding at the end": padded_batch,
    "slices at running ends": sliced_loop,
    "narrow at running starts": narrowed_loop,
    "bias by permuted ids": bias_by_permuted_ids,
    "bias repeated by counts": bias_repeated,
    "a constant per expert": constant_per_expert,
    "a frozen buffer": lambda m, x, c: x * m.frozen,
    "gated halves": lambda m, x, c: torch.cat([F.glu(x), F.glu(-x)], -1),
    "two results stacked": lambda m, x, c: torch.stack([x, x.relu()], 1).sum(1),
}


@pytest.mark.parametrize("case", PROVEN)
def test_rows_are_followed_through(fake_ranks, case):
    proof = verdict_on(PROVEN[case], fake_ranks)
    assert isinstance(proof, RowProof), proof


def test_an_order_of_what_is_ordered_is_followed(fake_ranks):
    def body(m, x, c):
        ids = m.expert_of_rows(x, c)
        falling = torch.argsort(ids, stable=True, descending=True)
        index = falling[torch.argsort(ids[falling], stable=True)]
        return put_back(index, m.product(x[index], m.totals(c)))

    proof = verdict_on(body, fake_ranks)
    assert isinstance(proof, RowProof), proof
    assert proof.sampled == 0


def padded_to_all_rows(m, x, c):
    """A product rounds by its number of rows: with padding as long as all, by that of a chunk."""
    perm, sizes = m.perm(x, c), m.totals(c).tolist()
    zeros = [x.new_zeros(x.shape[0] - size, WIDTH) for size in sizes]
    parts = [torch.cat(pair) for pair in zip(x[perm].split(sizes), zeros, strict=True)]
    out = [y[:size] for y, size in zip(m.each(parts), sizes, strict=True)]
    return put_back(perm, torch.cat(out))


def sizes_written_beside_others(m, x, c):
    """Of a list of tensors written in place the first alone was taken for written."""
    perm, totals = m.perm(x, c), m.totals(c)
    torch._foreach_add_([torch.zeros_like(totals), totals], [totals, totals.roll(1) - totals])
    return put_back(perm, m.product(x[perm], totals))


def permuted_again(m, x, c):
    perm = m.perm(x, c)
    return m.product(x[perm], m.totals(c))[perm]


def joined_backwards(m, x, c):
    perm = m.perm(x, c)
    parts = m.each(x[perm].split(m.totals(c).tolist()))
    return put_back(perm, torch.cat(parts[::-1]))


def put_back_by_another(m, x, c):
    y = m.product(x[m.searched(x, c)], m.totals(c))
    return put_back(m.searched(x, c + 1), y)


def indices_from_outside(m, x, c):
    runs = torch.searchsorted(c.cumsum(0), torch.arange(x.shape[0]), right=True)
    perm = torch.argsort(m.table[runs], stable=True)
    return put_back(perm, m.product(x[perm], m.totals(c)))


def indices_moved_by_outside(m, x, c):
    runs = torch.searchsorted(c.cumsum(0), torch.arange(x.shape[0]), right=True)
    perm = torch.argsort(runs % m.local + m.table[0], stable=True)
    return put_back(perm, m.product(x[perm], m.totals(c)))


def unstable_runs(m, x, c):
    perm = m.perm(x, c, stable=False)
    sizes = c.view(m.num_ranks, -1).T.reshape(-1).tolist()
    return put_back(perm, torch.cat(x[perm].split(sizes)))


def unstable_searched(m, x, c):
    runs = torch.searchsorted(c.cumsum(0), torch.arange(x.shape[0]), right=True)
    perm = torch.argsort(runs % m.local)
    return put_back(perm, m.product(x[perm], m.totals(c)))


def scaled_in_part(cut):
    """Return experts whose rows are split by `cut(rows, totals)`, the first part doubled."""

    def body(m, x, c):
        totals, perm = m.totals(c).tolist(), m.searched(x, c)
        first = cut(x.shape[0], totals)
        head, tail = x[perm].split([first, x.shape[0] - first])
        return put_back(perm, torch.cat([head * 2, tail]))

    return body


def scaled_in_padding(m, x, c):
    """Other experts' counts say how long the padding is, over which a gradient is summed."""
    parts = torch.split(x[m.perm(x, c)], m.totals(c).tolist())
    padded = [torch.cat([p, x.new_zeros(x.shape[0] - len(p), x.shape[1])]) for p in parts]
    scaled = [rows * m.w1[e, 0, 0] for e, rows in enumerate(padded)]
    done = [
        rows.split([len(p), x.shape[0] - len(p)])[0] for rows, p in zip(scaled, parts, strict=True)
    ]
    return put_back(m.perm(x, c), torch.cat(done))


def groups_padded_by_the_neighbours_count(m, x, c):
    totals, perm = m.totals(c), m.perm(x, c)
    sizes = totals.tolist()
    pads = [sizes[e - 1] for e in range(m.local)]
    parts = zip(torch.split(x[perm], sizes), pads, strict=True)
    padded = torch.cat([torch.cat([p, x.new_zeros(pad, x.shape[1])]) for p, pad in parts])
    y = m.product(padded, totals + totals.roll(1))
    both = y.split([size for pair in zip(sizes, pads, strict=True) for size in pair])
    return put_back(perm, torch.cat(both[::2]))


def behind_the_last_group(m, x, c):
    y = m.product(torch.cat([x[m.perm(x, c)], x]), m.totals(c))
    return y[x.shape[0] :]


def counts_overwritten(m, x, c):
    perm, totals = m.perm(x, c), m.totals(c)
    totals.view(2, 2).fill_(3)
    return put_back(perm, m.product(x[perm], totals))


def counts_turned(m, x, c):
    perm, pairs = m.perm(x, c), m.totals(c).view(2, 2)
    pairs.t_()
    return put_back(perm, m.product(x[perm], pairs.reshape(-1)))


def masked_in_another_order(m, x, c):
    labels, perm = torch.sort(m.expert_of_rows(x, c), stable=True)
    return put_back(perm, m.product(x[perm], m.totals(c))).masked_fill((labels > 0)[:, None], 0.0)


def labels_as_columns(m, x, c):
    return x + m.expert_of_rows(x, c).sum()


def ids_of_one_rank(m, x, c):
    ids = torch.repeat_interleave(torch.arange(4), c[:4], output_size=x.shape[0])
    return x + m.w2[:, 0][ids]


def scan_through_a_view(m, x, c):
    out = x.clone()
    out.view(-1).cumsum_(0)
    return out


def one_twice(m):
    first, _, *others = by_expert(m)
    return [first, first, *others]


REFUSED = {
    "pieces of numbers, one of them twice": (by_pieces(one_twice), Reason.ROWS_OUT_OF_ORDER),
    "pieces of numbers as received": (
        by_pieces(lambda m: range(m.num_ranks * m.local)),
        Reason.SHARED_PARAMETER,
    ),
    "labels counted in bins of two": (counted_by_histc(LOCAL, 2 * LOCAL), Reason.SHARED_PARAMETER),
    "labels counted without the last": (
        counted_by_histc(LOCAL, LOCAL - 2),
        Reason.SHARED_PARAMETER,
    ),
    "labels counted between bounds of their own": (
        counted_by_histc(LOCAL, 0),
        Reason.SHARED_PARAMETER,
    ),
    "masks of labels in another order": (masked_in_another_order, Reason.ROWS_MIXED),
    "a sum of labels": (labels_as_columns, Reason.VALUE_FROM_COUNTS),
    "permuted twice": (permuted_again, Reason.ROWS_MIXED),
    "pieces joined backwards": (joined_backwards, Reason.ROWS_OUT_OF_ORDER),
    "put back by another index": (put_back_by_another, Reason.ROWS_OUT_OF_ORDER),
    "indices from outside": (indices_from_outside, Reason.ROWS_FROM_OUTSIDE),
    "indices moved by a tensor from outside": (
        indices_moved_by_outside,
        Reason.ROWS_FROM_OUTSIDE,
    ),
    "last row": (lambda m, x, c: x - x[-1], Reason.ROWS_MIXED),
    "runs after an unstable sort": (unstable_runs, Reason.UNSTABLE_SORT),
    "rows after an unstable sort, not followed": (unstable_searched, Reason.UNSTABLE_SORT),
    "half of the rows, not followed": (scaled_in_part(lambda n, t: n // 2), Reason.ROWS_MIXED),
    "five rows, not followed": (scaled_in_part(lambda n, t: 5), Reason.ROWS_MIXED),
    "rows of the last expert where the first one's are": (
        scaled_in_part(lambda n, t: t[-1]),
        Reason.PREMISE_FALSE,
    ),
    "a scale read by rows and padding": (scaled_in_padding, Reason.SHARED_PARAMETER),
    "groups padded by the neighbour's count": (
        groups_padded_by_the_neighbours_count,
        Reason.SHARED_PARAMETER,
    ),
    "there are rows after the last group": (behind_the_last_group, Reason.ROWS_MIXED),
    "counts written through a view": (counts_overwritten, Reason.UNKNOWN_OPERATOR),
    "counts turned in place": (counts_turned, Reason.UNKNOWN_OPERATOR),
    "ids from one rank's counts": (ids_of_one_rank, Reason.ROWS_MIXED),
    "scan through a view": (scan_through_a_view, Reason.UNKNOWN_OPERATOR),
    "padded by counts of other experts": (padded_to_all_rows, Reason.SHARED_PARAMETER),
    "sizes written beside others": (sizes_written_beside_others, Reason.UNKNOWN_OPERATOR),
    "first row": (lambda m, x, c: x - x[:1], Reason.ROWS_MIXED),
    "rows as columns": (lambda m, x, c: x * x.t().sum(1), Reason.ROWS_MIXED),
    "position of the row": (
        lambda m, x, c: x + torch.ones_like(x[:, :1]).cumsum(0),
        Reason.VALUE_FROM_COUNTS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_rows_out_of_order_are_refused(fake_ranks, case):
    body, reason = REFUSED[case]
    verdict = verdict_on(body, fake_ranks)
    assert getattr(verdict, "reason", verdict) is reason, verdict


class TableWritten(Ordered):
    """Sorts by a table of ids that was made of constants, then written."""

    def splits(self, counts, received):
        self._ids = torch.arange(self.local).repeat(self.num_ranks)
        self._ids[0] = 1
        return super().splits(counts, received)

    def experts(self, rows, received):
        ids, self._ids = self._ids, None
        ids = torch.repeat_interleave(ids, received, output_size=rows.shape[0])
        perm = torch.argsort(ids, stable=True)
        return put_back(perm, self.product(rows[perm], self.totals(received)))


def test_a_table_that_was_written_is_no_constant(fake_ranks):
    verdict = judge(layer_of(TableWritten, fake_ranks), tokens())
    assert getattr(verdict, "reason", verdict) is Reason.ROWS_MIXED


def divided_by_a_count(totals):
    """As many as `totals` where the last expert has rows, which a chunk may not have."""
    by = torch.cat([totals.new_ones(3), totals[3:]])
    return totals * by // by


GROUPS = {
    "half of the rows": lambda t: t // 2,
    "divided by a count": divided_by_a_count,
    "rounded to half": lambda t: (t + 7) // 8 * 4,
    "rounded down where it is one too many": lambda t: (t + 6) // 8 * 8,
    "as large as the neighbour's": lambda t: torch.maximum(t, t.roll(1)),
    "the neighbour's": lambda t: t.roll(1),
    "one row less": lambda t: t - 1,
}


@pytest.mark.parametrize("case", GROUPS)
@pytest.mark.parametrize("perm", ["perm", "searched"])
def test_groups_that_may_not_hold_their_experts_rows_are_refused(fake_ranks, perm, case):
    def body(m, x, c):
        index = getattr(m, perm)(x, c)
        return put_back(index, m.product(x[index], GROUPS[case](m.totals(c))))

    verdict = verdict_on(body, fake_ranks)
    assert getattr(verdict, "reason", verdict) is Reason.SHARED_PARAMETER


@pytest.mark.parametrize("again", ["to", "contiguous", "float", "type_as", "whole"])
def test_a_weight_that_experts_read_by_what_gives_it_back_is_one_weight(fake_ranks, again):
    """Each `weight.to(weight.dtype)` was taken for a weight of its own."""
    same = {
        "to": lambda w: w.to(torch.float32),
        "contiguous": lambda w: w.contiguous(),
        "float": lambda w: w.float(),
        "type_as": lambda w: w.type_as(w),
        "whole": lambda w: w.float().contiguous(),
    }[again]

    def body(m, x, c):
        perm = m.perm(x, c)
        parts = torch.split(x[perm], m.totals(c).tolist())
        return put_back(perm, torch.cat([part + same(m.bias) for part in parts]))

    style = type("Written", (Ordered,), {"body": staticmethod(body)})
    layer = layer_of(style, fake_ranks, torch.float32)
    layer.bias = torch.nn.Parameter(torch.ones(WIDTH))
    verdict = judge(layer, tokens(torch.float32))
    assert getattr(verdict, "reason", verdict) is Reason.SHARED_PARAMETER, verdict


@pytest.mark.parametrize("number", [1, 2])
def test_a_part_of_the_rows_that_is_some_experts_is_followed(fake_ranks, number):
    proof = verdict_on(scaled_in_part(lambda n, t: sum(t[:number])), fake_ranks)
    assert isinstance(proof, RowProof) and proof.sampled, proof


def test_where_no_input_says_what_has_a_gradient_any_float_might(fake_ranks):
    style = type("Scaled", (Ordered,), {"body": staticmethod(lambda m, x, c: x * m.frozen)})
    layer = style(WIDTH, HIDDEN, EXPERTS, TOP_K, fake_ranks).requires_grad_(False)
    verdict = judge(layer, tokens().detach())
    assert getattr(verdict, "reason", verdict) is Reason.SHARED_PARAMETER
