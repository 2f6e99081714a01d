"""One proof is made for regions that differ in names; any other difference asks for another."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import is_symbolic
from torch.utils import _pytree as pytree

from moe_compile.backend import rewrite
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.facts import GraphFacts
from moe_compile.journal.reasons import Left
from moe_compile.proof import region_form, row_proof
from moe_compile.proof.region_form import form_of
from moe_compile.proof.row_proof import prove_rows_independent
from moe_compile.regions.detect_moe import find_moe_regions
from moe_compile.regions.regions import RowProof
from tests.batch_layers import POSITIONS, Block
from tests.batch_layers import WIDTH as BLOCK_WIDTH
from tests.capture import dynamo_graphs
from tests.layers import FusedGateUp, GroupedExperts, LoopExperts
from tests.proof.verdicts import EXPERTS, HIDDEN, TOP_K, WIDTH, tokens


@pytest.fixture
def made(monkeypatch):
    """Names of the regions whose proof was made."""
    region_form.forget()
    names, trace = [], row_proof.trace_body

    def counted(region, **settings):
        names.append(region.name)
        return trace(region, **settings)

    monkeypatch.setattr(row_proof, "trace_body", counted)
    return names


def proofs(layers, x, **settings):
    """Return the regions of `layers`, one after another, each with its verdict."""
    (gm,) = dynamo_graphs(nn.Sequential(*layers), x)
    regions, _ = find_moe_regions(GraphFacts(gm.graph))
    return [(region, prove_rows_independent(region, **settings)) for region in regions]


def alike(style, group, num, **changed):
    return [style(WIDTH, HIDDEN, EXPERTS, TOP_K, group, **changed) for _ in range(num)]


@pytest.mark.parametrize("style", [GroupedExperts, FusedGateUp, LoopExperts])
def test_like_layers_are_proven_once_and_each_proof_is_of_its_own_layer(fake_ranks, made, style):
    found = proofs(alike(style, fake_ranks, 3), tokens())
    assert made == ["region 0"]
    for region, kept in found[1:]:
        region_form.forget()
        anew = prove_rows_independent(region)
        assert isinstance(kept, RowProof)
        assert kept == anew
        sizes = [s for node in region.body for s in sizes_of(node)]
        assert [kept.facts.formula(s) for s in sizes] == [anew.facts.formula(s) for s in sizes]


class WrittenRows(LoopExperts):
    """Writes the rows received in place; pieces of them are views that no backward knows then."""

    def experts(self, rows, *received):
        rows = rows * 1.0
        rows.mul_(0.5)
        return super().experts(rows, *received)


class WrittenSlices(LoopExperts):
    """Writes the rows received in place, and then reads slices of them."""

    def experts(self, rows, received):
        counts, self._counts = self._counts, None
        rows = rows * 1.0
        rows.mul_(0.5)
        done, b = [], 0
        for i, count in enumerate(counts):
            a, b = b, b + count
            done.append(self.expert(rows[a:b], i % self.local))
        return torch.cat(done)


@pytest.mark.parametrize("style", [WrittenRows, WrittenSlices])
def test_a_region_whose_rows_are_written_in_place_is_proven(fake_ranks, made, style):
    (region, proof), (_, again) = proofs(alike(style, fake_ranks, 2), tokens())
    assert isinstance(proof, RowProof) and isinstance(again, RowProof)
    assert made == ["region 0"]
    (env,) = {s.node.shape_env for n in region.body for s in sizes_of(n) if is_symbolic(s)}
    assert env.pending_fresh_unbacked_symbols == []


def sizes_of(node):
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        return [size for size in value.shape if isinstance(size, torch.SymInt)]
    return [value] if isinstance(value, torch.SymInt) else []


def test_what_a_second_program_has_alike_is_not_proven_again(fake_ranks, made):
    for _ in range(2):
        proofs(alike(GroupedExperts, fake_ranks, 1), tokens())
    assert len(made) == 1


def test_of_a_batch_in_parts_one_region_is_proven_whole_and_one_in_a_part(fake_ranks, made):
    blocks = [Block(GroupedExperts, torch.bfloat16) for _ in range(2)]
    x = torch.randn(4, POSITIONS, BLOCK_WIDTH, dtype=torch.bfloat16)
    (gm,) = dynamo_graphs(nn.Sequential(*blocks), x)
    config = MegaMoEConfig(batch_parts=2, chunks=2, numerics="bounded", codegen="fx")
    _, compilation = rewrite(gm, config)
    assert [region.num_chunks for region in compilation.regions] == [2, 2, 2, 2]
    assert made == ["region 0", "region 0"]


def test_a_proof_that_shares_nothing_does_where_sums_may_round(fake_ranks, made):
    layers = alike(GroupedExperts, fake_ranks, 1)
    proofs(layers, tokens())
    proofs(layers, tokens(), may_round=True)
    assert len(made) == 1


class Scaled(GroupedExperts):
    """Multiplies what experts make by a constant."""

    factor = 2.0

    def experts(self, rows, received):
        return super().experts(rows, received) * self.factor


class Offset(GroupedExperts):
    """Computes with labels of experts that are off by a constant, which a premise compares."""

    first = 0

    def expert_of_rows(self, rows, received):
        ends = torch.cumsum(received, 0)
        found = torch.searchsorted(ends, torch.arange(rows.shape[0]), right=True)
        return (found + self.first) % self.local


class Columns(GroupedExperts):
    """Has weights whose matrices lie column by column."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.w1 = nn.Parameter(self.w1.detach().mT.contiguous().mT)


class Frozen(GroupedExperts):
    """Has one weight that takes no gradient."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.w1.requires_grad_(False)


def other_constant(layer):
    layer.factor = 3.0
    return layer


@pytest.mark.parametrize("other", [Columns, Frozen])
def test_another_stride_or_gradient_is_another_form(fake_ranks, made, other):
    plain, changed = (alike(style, fake_ranks, 1)[0] for style in (GroupedExperts, other))
    (_, first), (region, second) = proofs([plain, changed], tokens())
    assert isinstance(first, RowProof)
    assert made == ["region 0", "region 1"]
    region_form.forget()
    assert second == prove_rows_independent(region)


def test_another_constant_is_another_form(fake_ranks, made):
    first, second = alike(Scaled, fake_ranks, 2)
    second.factor = 3.0
    proofs([first, second], tokens())
    assert made == ["region 0", "region 1"]


def test_a_constant_that_makes_an_index_wrong_is_refused_beside_a_like_region(fake_ranks, made):
    right, wrong = alike(Offset, fake_ranks, 2)
    wrong.first = 1
    (_, first), (_, second) = proofs([right, wrong], tokens())
    assert isinstance(first, RowProof)
    assert isinstance(second, Left)
    assert made == ["region 0", "region 1"]


def test_another_type_is_another_form(fake_ranks, made):
    for dtype in (torch.bfloat16, torch.float32):
        proofs(alike(LoopExperts, fake_ranks, 1, dtype=dtype), tokens(dtype))
    assert len(made) == 2


class Refusing(GroupedExperts):
    """Adds to rows a mean of all of them."""

    def experts(self, rows, received):
        return super().experts(rows - rows.mean(0), received)


def test_a_refusal_is_of_the_lines_of_its_own_region(fake_ranks, made):
    class Elsewhere(Refusing):
        def experts(self, rows, received):
            return GroupedExperts.experts(self, rows - rows.mean(0), received)

    first, other = (alike(style, fake_ranks, 1)[0] for style in (Refusing, Elsewhere))
    (_, one), (_, two) = proofs([first, other], tokens())
    assert isinstance(one, Left) and isinstance(two, Left)
    assert one.reason is two.reason
    assert one.detail != two.detail
    assert made == ["region 0", "region 1"]


def test_what_the_tracer_learns_of_a_size_is_in_the_form(fake_ranks):
    (gm,) = dynamo_graphs(*alike(GroupedExperts, fake_ranks, 1), tokens())
    (region,), _ = find_moe_regions(GraphFacts(gm.graph))
    before = form_of(region).key
    assert form_of(region).key == before
    size = next(s for node in region.body for s in sizes_of(node))
    torch._check(size <= 50)
    assert form_of(region).key != before


def test_another_relation_of_sizes_is_another_form(fake_ranks):
    (gm,) = dynamo_graphs(*alike(GroupedExperts, fake_ranks, 1), tokens())
    (region,), _ = find_moe_regions(GraphFacts(gm.graph))
    node = next(n for n in region.row_side if sizes_of(n))
    value, (rows,) = node.meta["example_value"], sizes_of(node)
    other = next(s for n in region.body for s in sizes_of(n) if s.node.expr != rows.node.expr)
    keys = []
    for size in (rows, other):
        node.meta["example_value"] = value.new_empty(size, *value.shape[1:])
        keys.append(form_of(region).key)
    assert keys[0] != keys[1]


def test_no_more_proofs_are_kept_than_are_to_be(fake_ranks, made, monkeypatch):
    monkeypatch.setattr(region_form, "MOST", 1)
    layers = [alike(style, fake_ranks, 1)[0] for style in (GroupedExperts, FusedGateUp)]
    proofs([*layers, *layers], tokens())
    assert made == ["region 0", "region 1", "region 2", "region 3"]


def test_a_kept_proof_holds_no_graph(fake_ranks, made):
    proofs(alike(GroupedExperts, fake_ranks, 1), tokens())
    (kept,) = region_form._KEPT.values()
    fields = pytree.tree_leaves([getattr(kept, one.name) for one in dataclasses.fields(kept)])
    assert not any(isinstance(leaf, torch.fx.Node) for leaf in fields)
