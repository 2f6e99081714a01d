"""Loops over experts that mix rows, or leave some out, are refused with the reason."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_compile.journal.reasons import Reason
from moe_compile.regions.regions import RowProof
from tests import loop_layers
from tests.loop_layers import Linear, ListOfExperts, Masked, SlicesAssigned, WhereAndAdd
from tests.proof.verdicts import judge, layer_of, tokens
from tests.slow_parameters import one_per_reason, slow_but


@pytest.fixture(autouse=True)
def captured_searches():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


class RowsOfTwo(ListOfExperts):
    """An expert computes the rows of the next one too."""

    def experts(self, rows, received):
        ids = self.expert_of_rows(rows, received)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.own):
            (places,) = torch.where((ids == e) | (ids == e + 1))
            out[places] = expert(rows[places])
        return out


class OthersPlaces(ListOfExperts):
    """Results are written where the rows of another expert stood."""

    def experts(self, rows, received):
        ids = self.expert_of_rows(rows, received)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.own):
            out[ids == (e + 1) % self.local] = expert(rows[ids == e])
        return out


class LastLeftOut(ListOfExperts):
    """The last expert is no expert: its rows stay zero."""

    def experts(self, rows, received):
        ids = self.expert_of_rows(rows, received)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.own[:-1]):
            out[ids == e] = expert(rows[ids == e])
        return out


class LargeRows(ListOfExperts):
    """Rows are chosen by their values."""

    def experts(self, rows, received):
        (places,) = torch.where(rows.sum(1) > 0)
        return rows.index_add(0, places, rows[places])


class AddedToNothing(ListOfExperts):
    """Results are added to memory that nothing filled."""

    def experts(self, rows, received):
        ids = self.expert_of_rows(rows, received)
        out = torch.empty_like(rows)
        for e, expert in enumerate(self.own):
            (places,) = torch.where(ids == e)
            out.index_add_(0, places, expert(rows[places]))
        return out


class NextSlice(SlicesAssigned):
    """A slice is written by the rows before it, as long as they are."""

    def experts(self, rows, received):
        out = torch.zeros_like(rows)
        for e, a, b in self.runs():
            out[a:b] = self.own[e](rows[a:b]) + out.mean(0)
        return out


class CentredRows(WhereAndAdd):
    """A checkpoint around what subtracts a mean over the rows of all experts."""

    def experts(self, rows, received):
        return checkpoint(lambda x: x - x.mean(0), rows, use_reentrant=False)


class MixingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0)


class MixedGradients(ListOfExperts):
    """A function that mixes rows in its backward alone."""

    def experts(self, rows, received):
        return MixingBackward.apply(rows)


class OneWeight(ListOfExperts):
    """A product by hand of rows of all experts."""

    def experts(self, rows, received):
        return Linear.apply(rows, self.own[0].gate @ self.own[0].down)


REFUSED = {
    RowsOfTwo: Reason.SHARED_PARAMETER,
    OthersPlaces: Reason.ROWS_MIXED,
    LastLeftOut: Reason.ROWS_OUT_OF_ORDER,
    LargeRows: Reason.UNKNOWN_OPERATOR,
    AddedToNothing: Reason.ROWS_MIXED,
    NextSlice: Reason.VALUE_FROM_COUNTS,
    CentredRows: Reason.ROWS_MIXED,
    MixedGradients: Reason.ROWS_MIXED,
    OneWeight: Reason.SHARED_PARAMETER,
}


@pytest.mark.parametrize("style", one_per_reason(REFUSED), ids=lambda s: s.__name__)
def test_a_loop_that_mixes_rows_is_refused(fake_ranks, style):
    verdict = judge(layer_of(style, fake_ranks), tokens())
    assert getattr(verdict, "reason", verdict) is REFUSED[style], verdict


QUICK = [
    loop_layers.WhereAndAdd, loop_layers.Masked, loop_layers.ScatteredColumn,
    loop_layers.SlicesAssigned, loop_layers.CheckpointedLoop, loop_layers.ChannelAttention,
]  # fmt: skip
"""Rows found by a search, a mask, an index, in slices; in a checkpoint."""


@pytest.mark.parametrize("style", slow_but(QUICK, loop_layers.LOOPS), ids=lambda s: s.__name__)
def test_a_loop_is_proven(fake_ranks, style):
    verdict = judge(layer_of(style, fake_ranks), tokens())
    assert isinstance(verdict, RowProof), verdict


def test_what_mixes_rows_of_one_expert_is_told_of(fake_ranks):
    """Chunks of tokens, and gathered tokens, have no use for such a proof."""
    mixing = judge(layer_of(loop_layers.CenteredExperts, fake_ranks), tokens())
    plain = judge(layer_of(Masked, fake_ranks), tokens())
    assert {e for _, experts in mixing.whole for e in experts} == {0, 1, 2, 3}
    assert not plain.whole
