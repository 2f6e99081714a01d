"""A table with an entry per expert meets rows where each group holds the rows of its expert."""

import pytest
import torch
from torch import nn

from moe_compile.journal.reasons import Left
from moe_compile.regions.regions import RowProof
from tests.layers import GroupedExperts
from tests.proof.verdicts import WIDTH, judge, layer_of, tokens
from tests.slow_parameters import slow_but


class Biased(GroupedExperts):
    """A bias per expert on a grouped GEMM, found by the place of a row; steps may be replaced."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.bias = nn.Parameter(rand(self.local, width))
        self.own = nn.Parameter(rand(1, width))

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        ends = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        out = torch._grouped_mm(rows[perm], self.w1 @ self.w2, offs=ends)
        out = self.meet(out, self.table()[self.group_of(ends, rows.shape[0])])
        return torch.zeros_like(out).index_copy(0, perm, out)

    def table(self):
        return torch.cat([self.bias, torch.zeros(1, WIDTH, dtype=self.bias.dtype)])

    def group_of(self, ends, num_rows):
        return torch.searchsorted(ends, torch.arange(num_rows), right=True)

    def meet(self, rows, spread):
        return rows + spread.to(rows.dtype)


def verdict(fake_ranks, **steps):
    style = type("Case", (Biased,), steps)
    return judge(layer_of(style, fake_ranks), tokens())


ACCEPTED = {
    "as it is": {},
    "read by index_select": {
        "meet": lambda m, rows, spread: spread * rows,
        "group_of": lambda m, ends, n: torch.searchsorted(
            ends, torch.arange(n), right=True, out_int32=True
        ),
    },
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_table_spread_over_the_rows_of_its_experts_is_proven(fake_ranks, case):
    proof = verdict(fake_ranks, **ACCEPTED[case])
    assert isinstance(proof, RowProof), proof
    assert proof.unsliceable == () and len(proof.sliceable) == 1


def written_table(m):
    table = Biased.table(m)
    table[-1] = m.own[0]
    return table


def two_tables(m):
    return torch.cat([m.bias, m.own])


REFUSED = {
    "an entry behind that is a parameter": {"table": two_tables},
    "an entry behind that is written": {"table": written_table},
    "an entry of no expert": {
        "table": lambda m: torch.cat([two_tables(m), torch.zeros(1, WIDTH, dtype=m.bias.dtype)])
    },
    "two entries behind": {
        "table": lambda m: torch.cat([m.bias, torch.zeros(2, WIDTH, dtype=m.bias.dtype)])
    },
    "no entry behind": {"table": lambda m: m.bias},
    "constants in front": {
        "table": lambda m: torch.cat([torch.zeros(1, WIDTH, dtype=m.bias.dtype), m.bias])
    },
    "places that end a group in the next": {
        "group_of": lambda m, ends, n: torch.searchsorted(ends, torch.arange(n))
    },
    "groups of other experts": {
        "group_of": lambda m, ends, n: torch.searchsorted(
            torch.cumsum(torch.diff(ends, prepend=ends.new_zeros(1)).flip(0), 0),
            torch.arange(n),
            right=True,
        )
    },
    "places from one on": {
        "group_of": lambda m, ends, n: torch.searchsorted(ends, torch.arange(1, n + 1), right=True)
    },
    "summed over the rows": {"meet": lambda m, rows, spread: rows + spread.sum(0)},
    "entries of other places": {"meet": lambda m, rows, spread: rows + spread.flip(0)},
    "columns of the table": {"meet": lambda m, rows, spread: rows * spread[:, :1]},
    "two tables together": {"meet": lambda m, rows, spread: rows + (spread + spread)},
}


@pytest.mark.parametrize("case", slow_but([*REFUSED][::4], REFUSED))
def test_what_would_mix_experts_or_read_more_than_constants_is_refused(fake_ranks, case):
    found = verdict(fake_ranks, **REFUSED[case])
    assert isinstance(found, Left)
