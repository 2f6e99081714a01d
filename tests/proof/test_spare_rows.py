"""Experts that take rows behind those of the counts, and some that would read them."""

import pytest
import torch

from moe_compile.graph.facts import GraphFacts
from moe_compile.journal.reasons import Reason
from moe_compile.proof.spare_rows import check_spare_rows
from moe_compile.regions.body_nodes import needs_of_body
from moe_compile.regions.count_facts import CountFacts
from moe_compile.regions.detect_moe import find_moe_regions
from moe_compile.regions.regions import RowProof
from tests.capture import dynamo_graphs
from tests.layers import GroupedExperts
from tests.padded_layers import PaddedGroups


class Scaled(PaddedGroups):
    """Elementwise operators, casts and cuts of columns between the products."""

    def between(self, h):
        return torch.cat([half.float().tanh().to(h.dtype) for half in h.chunk(2, -1)], -1)


class Masked(PaddedGroups):
    """Activations by masks of the rows."""

    def between(self, h):
        h = torch.where(h > 0, h, h * 0.125)
        return h.masked_fill((h < -1) | h.isnan(), 0.0).clamp(max=4.0)


class MaskedByPlace(PaddedGroups):
    """A mask that is of places, not of rows."""

    def between(self, h):
        places = torch.arange(h.shape[0], device=h.device)[:, None]
        return torch.where(places < 3, h, h * 0.125)


class FirstRowBehind(PaddedGroups):
    """Places behind the last group read the first row: its gradient would be unfilled memory."""

    def read(self, indices, offs):
        behind = torch.arange(indices.shape[0], device=offs.device) >= offs[-1]
        return torch.where(behind, 0, indices)


class LastGroupHasTheRest(PaddedGroups):
    """The last group has all places that are left: how many depends on rows behind."""

    def indices(self, rows, received):
        indices, sizes, offs = super().indices(rows, received)
        last = torch.full_like(offs[-1:], 1) * indices.shape[0]
        return indices, sizes, torch.cat([offs[:-1], last])


class Doubled(PaddedGroups):
    """Rows by two experts, which are added up: two places hold one row."""

    def between(self, h):
        return h + torch.flip(h, [1])


def refusal(style, group):
    layer = style(64, 32, 8, 2, group)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    gm, *_ = dynamo_graphs(layer, x)
    (region,), _ = find_moe_regions(GraphFacts(gm.graph))
    facts = CountFacts(2, 4, 8)
    facts.root = tuple(map(facts.run, facts.received))  # as if the rows were proven independent
    return check_spare_rows(region, RowProof(facts=facts), needs_of_body(region))


@pytest.mark.parametrize("style", [PaddedGroups, Scaled, Masked])
def test_groups_found_on_the_device_take_rows_behind(fake_ranks, style):
    assert refusal(style, fake_ranks) is None


REFUSED = {
    FirstRowBehind: (Reason.ROWS_MIXED, "must hold exactly the counted rows"),
    LastGroupHasTheRest: (Reason.ROWS_MIXED, "gets other rows if padding rows follow"),
    MaskedByPlace: (Reason.UNKNOWN_OPERATOR, "where combines rows with other tensors"),
    Doubled: (Reason.UNKNOWN_OPERATOR, "what flip does to padding rows"),
    GroupedExperts: (Reason.PREMISE_UNCHECKED, "RuntimeError"),
}


@pytest.mark.parametrize("style", REFUSED, ids=lambda style: style.__name__)
def test_experts_that_would_read_rows_behind_are_refused(fake_ranks, style):
    reason, said = REFUSED[style]
    left = refusal(style, fake_ranks)
    assert left is not None and left.reason is reason and said in left.detail
