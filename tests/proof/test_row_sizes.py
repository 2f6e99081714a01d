"""Every dimension of every tensor of rows is known; the number of rows enters no other."""

import pytest
import torch
import torch.nn.functional as F

from moe_compile.journal.reasons import Reason
from moe_compile.regions.regions import RowProof
from tests.proof.test_row_orders import put_back, verdict_on

SIZES = {
    "rows repeated by their number": lambda m, x, c: (
        x.unsqueeze(0).expand(x.shape[0], -1, -1).sum(0)
    ),
    "columns of ones, as many as rows": lambda m, x, c: (
        torch.cat([x, x.new_ones(x.shape[0], x.shape[0])], 1).mean(1, keepdim=True) + x
    ),
    "product with ones by the rows": lambda m, x, c: (
        (x[:, :1, None] * x.new_ones(1, x.shape[0])).sum((1, 2))[:, None] + x
    ),
    "seen as rows by rows": lambda m, x, c: (
        x[:, :1].expand(-1, x.shape[0]).sum(1, keepdim=True) + x
    ),
    "summed ones": lambda m, x, c: x * x.new_ones(x.shape[0]).sum(),
    "length of a constant": lambda m, x, c: x * torch.zeros(x.shape[0], 3).add(2).prod(),
    "outside, as often as rows": lambda m, x, c: x * m.frozen.expand(x.shape[0], -1).sum(0),
    "outside, a part by the counts": lambda m, x, c: x * m.frozen[: x.shape[0]].sum(),
    "columns from the number of rows on": lambda m, x, c: x * x.narrow(1, x.shape[0] % 4, 1),
    "column at the number of rows": lambda m, x, c: x[:, : x.shape[0]].sum(1, keepdim=True) + x,
    "padded by the number of rows": lambda m, x, c: F.pad(x, (0, x.shape[0]), value=1.0)[:, :16],
    "strided over the rows": lambda m, x, c: x.as_strided((x.shape[0], 16), (0, 1)),
    "windows of rows": lambda m, x, c: x.unfold(0, 2, 1).sum(-1),
    "tiled by the counts": lambda m, x, c: x.repeat(1, x.shape[0]).sum(1, keepdim=True) + x,
}


@pytest.mark.parametrize("case", SIZES)
def test_a_dimension_as_long_as_the_counts_say_is_refused(fake_ranks, case):
    """Only the row dimension was compared with its order: sums over such others were cut too."""
    verdict = verdict_on(SIZES[case], fake_ranks)
    assert not isinstance(verdict, RowProof), verdict


def test_the_refusal_names_the_shape(fake_ranks):
    verdict = verdict_on(SIZES["rows repeated by their number"], fake_ranks)
    assert verdict.reason is Reason.SIZE_FROM_COUNTS, verdict


def test_rows_repeated_a_fixed_number_of_times_are_followed(fake_ranks):
    verdict = verdict_on(lambda m, x, c: x.unsqueeze(1).expand(-1, 3, -1).amax(1), fake_ranks)
    assert isinstance(verdict, RowProof), verdict


def inverted(write):
    """Return experts that put rows back by an inverse made with `write(perm, arange)`."""

    def body(m, x, c):
        perm = m.perm(x, c)
        y = m.product(x[perm], m.totals(c))
        return y[write(perm, torch.arange(x.shape[0]))]

    return body


def two_labels_of_one_slot(m, x, c):
    """Experts 0 and 3 read the same bias: as -1 the one, as 3 the other."""
    ids = torch.tensor([-1, 1, 2, 3]).repeat(m.num_ranks)
    ids = torch.repeat_interleave(ids, c, output_size=x.shape[0])
    return x + m.w2[:, 0][ids]


def cut_off_by_padding(m, x, c):
    """The last row is cut off, and a constant comes in its place."""
    shorter = torch.nn.functional.pad(x, (0, 0, 0, -1))
    return torch.nn.functional.pad(shorter, (0, 0, 0, 1))


def by_a_lossy_cast(m, x, c):
    perm = m.searched(x, c).to(torch.bfloat16).to(torch.int64)
    return put_back(perm, m.product(x[perm], m.totals(c)))


def bias_scaled_by_frequency(m, x, c):
    bias = F.embedding(m.expert_of_rows(x, c), m.w2[:, 0], scale_grad_by_freq=True)
    return x + bias


ARGUMENTS = {
    "added to minus one": inverted(lambda p, n: torch.full_like(p, -1).index_add(0, p, n)),
    "added with a fixed factor": inverted(
        lambda p, n: torch.zeros_like(p).index_add(0, p, n, alpha=2)
    ),
    "accumulated on ones": inverted(
        lambda p, n: torch.ones_like(p).index_put((p,), n, accumulate=True)
    ),
    "two labels of one slot": two_labels_of_one_slot,
    "the last row cut off": cut_off_by_padding,
    "an index cast and lost": by_a_lossy_cast,
    "a gradient scaled by frequency": bias_scaled_by_frequency,
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_that_changes_what_an_operator_does_is_looked_at(fake_ranks, case):
    """A sum into -1 was taken for an inverse, and slots -1 and E - 1 for two."""
    verdict = verdict_on(ARGUMENTS[case], fake_ranks)
    assert not isinstance(verdict, RowProof), verdict


INVERSES = {
    "written over": lambda p, n: torch.full_like(p, -1).index_put((p,), n),
    "copied": lambda p, n: torch.empty_like(p).index_copy(0, p, n),
    "added to zeros": lambda p, n: torch.zeros_like(p).index_add(0, p, n),
}


@pytest.mark.parametrize("case", INVERSES)
def test_an_inverse_written_over_or_into_zeros_is_followed(fake_ranks, case):
    verdict = verdict_on(inverted(INVERSES[case]), fake_ranks)
    assert isinstance(verdict, RowProof), verdict


def test_a_negative_label_reads_the_last_slot(fake_ranks):
    def body(m, x, c):
        ids = torch.tensor([0, 1, 2, -1]).repeat(m.num_ranks)
        return x + m.w2[:, 0][torch.repeat_interleave(ids, c, output_size=x.shape[0])]

    verdict = verdict_on(body, fake_ranks)
    assert isinstance(verdict, RowProof), verdict


def test_only_concatenations_along_the_rows_may_lose_an_input(fake_ranks):
    def body(m, x, c):
        return torch.cat([x, x * 0.5], 1)[:, : x.shape[1]]

    proof = verdict_on(body, fake_ranks)
    assert isinstance(proof, RowProof), proof
    assert proof.joins == ()
