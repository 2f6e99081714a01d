"""Indices with an entry for each element, and writes through another view of the same memory.

`gather` and `scatter` move whole rows only by an index that is one vector all along the rows.
"""

import pytest
import torch

from moe_compile.journal.reasons import Left, Reason
from moe_compile.regions.regions import RowProof
from tests.proof.test_row_orders import verdict_on
from tests.proof.verdicts import WIDTH
from tests.slow_parameters import slow_but


def wide(index, columns=WIDTH):
    return index.unsqueeze(-1).expand(-1, columns)


def gathered(m, x, c, perm, index):
    y = m.product(torch.gather(x, 0, index), m.totals(c))
    return torch.zeros_like(y).index_copy(0, perm, y)


MADE_WIDE = {
    "unsqueeze and expand": lambda perm: wide(perm),
    "None and expand": lambda perm: perm[:, None].expand(-1, WIDTH),
    "view and repeat": lambda perm: perm.view(-1, 1).repeat(1, WIDTH),
    "written out": lambda perm: wide(perm).contiguous(),
}


@pytest.mark.parametrize("form", MADE_WIDE)
@pytest.mark.parametrize("found", slow_but(["perm"], ["perm", "searched"]))
def test_rows_are_followed_through_a_gather_by_a_wide_index(fake_ranks, form, found):
    """`searched` is a permutation that is not followed: what it says is checked on samples."""

    def body(m, x, c):
        perm = getattr(m, found)(x, c)
        return gathered(m, x, c, perm, MADE_WIDE[form](perm))

    proof = verdict_on(body, fake_ranks)
    assert isinstance(proof, RowProof), proof
    assert (proof.sampled > 0) == (found == "searched")


COLUMNS = {
    "squeezed": lambda perm: perm.unsqueeze(-1).squeeze(-1),
    "selected": lambda perm: perm.view(-1, 1)[:, 0],
    "unbound": lambda perm: wide(perm).unbind(1)[-1],
    "viewed": lambda perm: perm[:, None].view(-1),
}


@pytest.mark.parametrize("form", slow_but([*COLUMNS][::3], COLUMNS))
def test_a_column_of_a_wide_index_is_the_vector_again(fake_ranks, form):
    def body(m, x, c):
        perm = m.perm(x, c)
        y = m.product(x[COLUMNS[form](perm)], m.totals(c))
        return torch.zeros_like(y).index_copy(0, perm, y)

    proof = verdict_on(body, fake_ranks)
    assert isinstance(proof, RowProof), proof
    assert proof.sampled == 0


BACK = {
    "scatter": lambda y, index: torch.empty_like(y).scatter(0, index, y),
    "scatter in place": lambda y, index: torch.zeros_like(y).scatter_(0, index, y),
    "a sum into zeros": lambda y, index: torch.zeros_like(y).scatter_add(0, index, y),
    "a sum in place": lambda y, index: torch.zeros_like(y).scatter_add_(0, index, y),
}


@pytest.mark.parametrize("way", slow_but([*BACK][::2], BACK))
def test_rows_are_followed_back_through_a_scatter_by_a_wide_index(fake_ranks, way):
    def body(m, x, c):
        perm = m.perm(x, c)
        return BACK[way](m.product(x[perm], m.totals(c)), wide(perm))

    proof = verdict_on(body, fake_ranks)
    assert isinstance(proof, RowProof), proof


def by_another_order(m, x, c):
    perm = m.perm(x, c)
    return torch.zeros_like(x).scatter(
        0, wide(torch.argsort(perm)), m.product(x[perm], m.totals(c))
    )


def shifted_in_each_column(m, x, c):
    index = (wide(m.perm(x, c)) + torch.arange(WIDTH)) % x.shape[0]
    return torch.gather(x, 0, index)


def along_the_columns(m, x, c):
    return torch.gather(x, 1, wide(m.perm(x, c)) % WIDTH)


def across(m, x, c):
    """As wide as the rows, but each row has the whole vector."""
    perm = m.perm(x, c)[:WIDTH].unsqueeze(0).expand(x.shape[0], -1)
    return torch.gather(x, 0, perm)


def some_columns(m, x, c):
    perm = m.perm(x, c)
    y = m.product(x[perm], m.totals(c))
    return torch.zeros_like(y).scatter(0, wide(perm, WIDTH // 2), y)


def twice(m, x, c):
    """Added into what holds the rows already."""
    perm = m.perm(x, c)
    return x.clone().scatter_add(0, wide(perm), m.product(x[perm], m.totals(c)))


OTHERS = {
    "an index of another order": (by_another_order, Reason.ROWS_OUT_OF_ORDER),
    "an index that differs along a row": (shifted_in_each_column, Reason.VALUE_FROM_COUNTS),
    "an index into the columns": (along_the_columns, Reason.VALUE_FROM_COUNTS),
    "a vector along each row": (across, Reason.VALUE_FROM_COUNTS),
    "some columns only": (some_columns, Reason.UNKNOWN_OPERATOR),
    "a sum into rows": (twice, Reason.UNKNOWN_OPERATOR),
}


@pytest.mark.parametrize("case", slow_but([*OTHERS][::3], OTHERS))
def test_other_indices_are_refused(fake_ranks, case):
    body, reason = OTHERS[case]
    verdict = verdict_on(body, fake_ranks)
    assert isinstance(verdict, Left)
    assert verdict.reason is reason, verdict


def sorted_back(m, x, c, write):
    """Return sorted rows in the order received, by `write(memory, perm, rows)`."""
    perm = m.perm(x, c)
    y = m.product(x[perm], m.totals(c))
    memory = y.new_zeros(y.shape)
    write(memory, perm, y)
    return memory


def through(memory, perm, y):
    memory.view(y.shape[0], 2, -1).index_put_((perm,), y.view(y.shape[0], 2, -1))


def test_a_write_through_another_view_of_all_rows_is_followed(fake_ranks):
    proof = verdict_on(lambda m, x, c: sorted_back(m, x, c, through), fake_ranks)
    assert isinstance(proof, RowProof), proof


def some_of_each(memory, perm, y):
    memory[:, : WIDTH // 2][perm] = y[:, : WIDTH // 2]


def crossed(m, x, c):
    """Rows are written into memory that is read the other way round."""
    y = m.product(x[m.perm(x, c)], m.totals(c))
    square = x.new_zeros(WIDTH, y.shape[0])
    square.view(y.shape[0], WIDTH)[m.perm(x, c)] = y
    return square.t()


def test_a_write_through_a_view_of_parts_of_rows_is_refused(fake_ranks):
    verdict = verdict_on(lambda m, x, c: sorted_back(m, x, c, some_of_each), fake_ranks)
    assert isinstance(verdict, Left)


def test_a_write_through_a_view_in_which_rows_lie_otherwise_is_refused(fake_ranks):
    assert isinstance(verdict_on(crossed, fake_ranks), Left)


def test_rows_that_were_written_with_some_to_spare_are_followed_to_the_last(fake_ranks):
    def body(m, x, c):
        perm = m.perm(x, c)
        more = x.new_zeros(x.shape[0] + 3, WIDTH)
        more[perm] = m.product(x[perm], m.totals(c))
        return more[:-3]

    proof = verdict_on(body, fake_ranks)
    assert isinstance(proof, RowProof), proof


def test_rows_that_were_written_with_some_to_spare_are_no_rows_sent_back(fake_ranks):
    def body(m, x, c):
        perm = m.perm(x, c)
        more = x.new_zeros(x.shape[0] + 3, WIDTH)
        more[perm] = m.product(x[perm], m.totals(c))
        return more[3:]

    verdict = verdict_on(body, fake_ranks)
    assert isinstance(verdict, Left)


def test_group_ends_made_of_host_integers_are_followed(fake_ranks):
    def body(m, x, c):
        perm = m.perm(x, c)
        ends = torch.tensor(m.totals(c).tolist()).cumsum(0).int()
        y = torch._grouped_mm(x[perm], m.w1 @ m.w2, offs=ends)
        return torch.zeros_like(y).index_copy(0, perm, y)

    proof = verdict_on(body, fake_ranks)
    assert isinstance(proof, RowProof), proof
    assert len(proof.sliceable) == 0 or proof.sampled == 0
