"""Several tensors of one region: those that are split like the rows travel with them, others not.

What is split by the same two lists has an entry for each row, in its place, whatever it holds.
"""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.query import bytes_of_row
from moe_compile.journal.reasons import Kind, Reason
from moe_compile.regions.detect_moe import find_moe_regions
from tests.capture import dynamo_graphs
from tests.layers import WAIT
from tests.megatron_layers import MegatronLayer, ScaledRows, TwoBack, TwoHops, TwoStacks, TwoSteps

WIDTH, HIDDEN, EXPERTS, TOP_K = 32, 32, 8, 2


def find(style, *groups):
    """Return the regions and the refusals of the one graph of a layer."""
    layer = style(WIDTH, HIDDEN, EXPERTS, TOP_K, *groups, torch.float32)
    x = torch.randn(9, WIDTH, requires_grad=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (gm,) = dynamo_graphs(layer, x)
    return find_moe_regions(GraphFacts(gm.graph))


def test_of_rows_of_a_width_known_at_run_time_no_bytes_are_known():
    rows = torch.empty(5, 2, 3, dtype=torch.bfloat16)
    assert [bytes_of_row(t) for t in (rows, rows[:, 0, 0], None)] == [12, 2, 0]
    with FakeTensorMode(shape_env=ShapeEnv()) as fake:
        sizes = StatelessSymbolicContext(
            [DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.DYNAMIC]
        )
        wide = fake.from_tensor(rows, symbolic_context=sizes)
    assert bytes_of_row(wide) == 0 and bytes_of_row(wide[:, 0]) == 0
    assert bytes_of_row(wide[:, :, 0]) == 4


def shapes(exchanges):
    return [one.sent.meta["example_value"].shape[1:] for one in exchanges]


@pytest.mark.parametrize(
    ("style", "there", "back"),
    [
        (MegatronLayer, [(WIDTH,), ()], [(WIDTH,)]),
        (ScaledRows, [(1,), (WIDTH,)], [(WIDTH,)]),
        (TwoBack, [(WIDTH,), ()], [(WIDTH,), ()]),
    ],
)
def test_all_that_travels_with_the_rows_is_of_their_region(fake_ranks, style, there, back):
    (region,), refused = find(style, fake_ranks)
    assert [r for r in refused if r.is_region] == []
    assert (shapes(region.dispatched), shapes(region.combined)) == (there, back)
    assert region.rows.meta["example_value"].shape[1:] == (WIDTH,)
    assert region.results[-1] is region.result
    assert {region.rows, region.counts} < region.inputs


@pytest.mark.parametrize("style", [TwoSteps, TwoStacks])
def test_what_needs_what_came_back_and_what_has_its_own_combine_is_another_region(
    fake_ranks, style
):
    regions, refused = find(style, fake_ranks)
    assert [len(r.launches) for r in regions] == [2, 2]
    assert regions[0].count_exchange is regions[1].count_exchange
    assert refused == []


class Entangled(TwoStacks):
    """The second stack reads the rows of the first, and each sends back its own."""

    def run(self, x, token, factors, at):
        first, second = self.there(x[token], at), self.there(x[token] * 2, at)
        parts = list(self.split_by_expert(at, first, second))
        out = torch.cat([self.expert(e, part) for e, (part, _) in enumerate(parts)])
        other = torch.cat([(a * b) @ self.w4[e] for e, (a, b) in enumerate(parts)])
        out, other = (self.back(self.in_order(at, t), at) for t in (out, other))
        return torch.zeros_like(x).index_add(0, token, out + other)


def test_stacks_that_read_each_others_rows_are_one_region(fake_ranks):
    (region,), _ = find(Entangled, fake_ranks)
    assert len(region.launches) == 4


class OtherSizes(ScaledRows):
    """Scales that are sent with another number of entries, or to other ranks, than the rows."""

    def scales_of(self, rows, at):
        raise NotImplementedError

    def run(self, x, token, factors, at):
        scales = self.scales_of(x[token], at)
        rows = self.there(x[token], at) * scales
        parts = self.split_by_expert(at, rows)
        out = torch.cat([self.expert(e, part) for e, (part,) in enumerate(parts)])
        out = self.back(self.in_order(at, out), at)
        return torch.zeros_like(x).index_add(0, token, out)


class TwoEntriesARow(OtherSizes):
    def scales_of(self, rows, at):
        scales = rows.detach().view(rows.shape[0], 2, -1).amax(2).reshape(-1)
        twice = at._replace(sent=[2 * n for n in at.sent], got=[2 * n for n in at.got])
        scales = self.there(scales, twice)
        return scales.view(-1, 2)[:, :1]


class ToOtherRanks(OtherSizes):
    def scales_of(self, rows, at):
        return self.there(rows.detach(), at._replace(sent=at.sent[::-1], got=at.got[::-1])).amax()


@pytest.mark.parametrize("style", [TwoEntriesARow, ToOtherRanks])
def test_what_is_not_split_like_the_rows_keeps_them_whole(fake_ranks, style):
    regions, refused = find(style, fake_ranks)
    assert regions == []
    (region,) = (r for r in refused if r.is_region)
    assert region.reason is Reason.SPLIT_OTHERWISE
    assert region.reason.kind is Kind.UNPROVEN


class SentOn(ScaledRows):
    """What the first dispatch brought is what the second one sends, without a way back between."""

    def run(self, x, token, factors, at):
        rows = self.there(x[token], at)
        again = self.there(torch.cat([rows, rows])[: token.shape[0]], at)
        out = self.back(rows + again, at)
        return torch.zeros_like(x).index_add(0, token, out)


def test_rows_that_are_sent_on_are_refused(fake_ranks):
    regions, refused = find(SentOn, fake_ranks)
    assert regions == []
    assert [r.reason for r in refused if r.is_region] == [Reason.COMMUNICATES]


class ReadBetween(TwoBack):
    """What came back is read before the other has: by views of it, in a product."""

    def back(self, tensor, at):
        out = super().back(tensor, at)
        return out.view(-1, WIDTH) * 2 if out.dim() > 1 else out


def test_what_reads_a_result_before_the_last_one_is_known(fake_ranks):
    (region,), _ = find(ReadBetween, fake_ranks)
    first, last = region.results
    assert [n.target for n in region.between][:1] == ["view"]
    assert all(first < node < last for node in region.between)


class WritesBetween(TwoBack):
    """One result is written before the other is back."""

    def back(self, tensor, at):
        return super().back(tensor, at).mul_(2)


def test_what_is_written_before_the_last_result_keeps_a_region_whole(fake_ranks):
    regions, refused = find(WritesBetween, fake_ranks)
    assert regions == []
    assert [r.reason for r in refused if r.is_region] == [Reason.ESCAPES]


def pairs():
    """Return groups of ranks of one place, and of one node, of two nodes with a rank each."""
    return dist.new_group([0, 1]), dist.new_group([0])


def test_of_two_hops_the_outer_is_said_to_be_one(fake_ranks):
    (inner,), refused = find(TwoHops, *pairs())
    (outer,) = refused
    assert (inner.name, outer.candidate) == ("region 1", "region 0")
    assert outer.reason is Reason.OUTER_HOP
    assert inner.name in outer.detail


class SumsOnTheWay(TwoHops):
    """Something else than the inner hop happens between the outer dispatch and combine."""

    def within_node(self, rows, counts):
        total = torch.ops._c10d_functional.all_reduce(rows.sum(0), "sum", self.within.group_name)
        return super().within_node(rows + WAIT(total), counts)


def test_an_outer_hop_with_other_collectives_inside_communicates(fake_ranks):
    _, refused = find(SumsOnTheWay, *pairs())
    assert [r.reason for r in refused if r.is_region] == [Reason.COMMUNICATES]
