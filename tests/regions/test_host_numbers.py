"""Numbers of the host and lengths of constants: what holds for all rows need not for a chunk's."""

import pytest
import torch

from moe_compile.journal.reasons import Left, Reason
from moe_compile.regions.regions import RowProof
from tests.proof.test_row_orders import put_back, verdict_on
from tests.proof.verdicts import WIDTH
from tests.slow_parameters import one_per_reason

ROWS = 64


def applied(change):
    """Return experts that apply `change` to the rows received, before their products."""

    def body(m, x, c):
        x = change(m, x, c)
        perm = m.perm(x, c)
        return put_back(perm, m.product(x[perm], m.totals(c)))

    return body


def scaled_by_what_is_asserted(m, x, c):
    active = (c > 0).sum().item()
    torch._check(active == 4)
    return x * active


def scaled_by_what_is_asserted_from_both_sides(m, x, c):
    active = (c > 0).sum().item()
    torch._check(active >= 4)
    torch._check(active <= 4)
    return x * (active * 2)


def added_to_as_many_as_asserted(m, x, c):
    torch._check(x.shape[0] == ROWS)
    return x + x.new_full((ROWS, WIDTH), 0.5)


def beside_as_many_as_asserted(m, x, c):
    torch._check(x.shape[0] == ROWS)
    return torch.cat([x, x.new_zeros(ROWS, WIDTH)], 1)[:, :WIDTH] * 1.5


def as_many_columns_as_rows(m, x, c):
    torch._check(x.shape[0] == WIDTH)
    return x + x.new_full((x.shape[0],), 0.5)


def padded_by(amount):
    def change(m, x, c):
        pad = amount(m, x, c)
        return (torch.cat([x, x.new_zeros(pad, WIDTH)]) * 0.5)[: x.shape[0]]

    return applied(change)


def difference(m, x, c):
    first, second, *_ = m.totals(c).tolist()
    return first + first - second


def beside_another_read(m, x, c):
    """What reads a value from outside cannot be tried; the maximum fails without rows."""
    outside = (m.frozen.sum() * 0).long().item()
    return m.expert_of_rows(x, c).max().item() + outside


def for_one_row(m, x, c):
    """Fails for exactly one row, whose place has no dimension then."""
    place = m.expert_of_rows(x, c)[:, None].squeeze()
    return torch.cat([place, place]).sum().item()


REFUSED = {
    "equal to a number": (applied(scaled_by_what_is_asserted), Reason.VALUE_FROM_COUNTS),
    "between two equal numbers": (
        applied(scaled_by_what_is_asserted_from_both_sides), Reason.VALUE_FROM_COUNTS,
    ),
    "a constant of so many rows": (
        applied(added_to_as_many_as_asserted), Reason.ROWS_FROM_OUTSIDE,
    ),
    "a constant of so many rows beside them": (
        applied(beside_as_many_as_asserted), Reason.ROWS_FROM_OUTSIDE,
    ),
    "a constant as wide as there are rows": (
        applied(as_many_columns_as_rows), Reason.SIZE_FROM_COUNTS,
    ),
    "divided by experts with rows": (
        padded_by(lambda m, x, c: x.shape[0] // (c > 0).sum().item()),
        Reason.FAILS_WITHOUT_ROWS,
    ),
    "a difference of counts": (padded_by(difference), Reason.FAILS_WITHOUT_ROWS),
    "nothing divided by nothing": (
        padded_by(lambda m, x, c: (c.float() / c.sum() * 10).sum().long().item()),
        Reason.FAILS_WITHOUT_ROWS,
    ),
    "a maximum beside another read": (padded_by(beside_another_read), Reason.FAILS_WITHOUT_ROWS),
    "one row alone": (padded_by(for_one_row), Reason.FAILS_WITHOUT_ROWS),
}  # fmt: skip


@pytest.mark.parametrize("case", one_per_reason(REFUSED))
def test_what_need_not_hold_for_the_rows_of_a_chunk_is_refused(fake_ranks, case):
    """They were proven, and chunks computed with other numbers, or failed."""
    body, reason = REFUSED[case]
    verdict = verdict_on(body, fake_ranks)
    assert getattr(verdict, "reason", verdict) is reason, verdict


def test_a_pad_that_is_never_negative_is_proven(fake_ranks):
    verdict = verdict_on(padded_by(lambda m, x, c: c.max().item()), fake_ranks)
    assert isinstance(verdict, RowProof), verdict


def test_what_is_written_into_a_value_from_outside_is_no_failure_of_ours(fake_ranks):
    """A write that cannot be tried ended the proof of every region with an error."""

    def written(m, x, c):
        number = m.frozen[:1].long() * 0
        number.add_(c.max())
        return number.item()

    assert isinstance(verdict_on(padded_by(written), fake_ranks), RowProof | Left)


@pytest.mark.parametrize(
    "rounded",
    [lambda per: per.int() * 2**30 // 2**30, lambda per: per.float() + 2**24 - 2**24],
    ids=["int32", "float32"],
)
def test_a_formula_that_its_type_does_not_hold_is_not_followed(fake_ranks, rounded):
    """Group sizes wrapped round, or were rounded, and were taken for the counts."""

    def body(m, x, c):
        perm = m.perm(x, c)
        return put_back(perm, m.product(x[perm], rounded(m.totals(c)).long()))

    verdict = verdict_on(body, fake_ranks)
    assert getattr(verdict, "reason", verdict) is Reason.SHARED_PARAMETER, verdict
