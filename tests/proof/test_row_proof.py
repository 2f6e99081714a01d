"""Experts that treat rows independently are proven to, in every style of layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_mutation,
)

from moe_compile.graph.facts import GraphFacts
from moe_compile.journal.reasons import Left
from moe_compile.proof.row_proof import prove_rows_independent
from moe_compile.regions.detect_moe import find_moe_regions
from moe_compile.regions.regions import RowProof
from tests.capture import dynamo_graphs
from tests.layers import (
    FusedGateUp,
    GroupedExperts,
    LoopExperts,
    SharedAndBias,
    SortedChunks,
)
from tests.proof.verdicts import WIDTH, judge, layer_of, tokens
from tests.slow_parameters import slow_but


@pytest.mark.parametrize(
    ("style", "num_gemms"),
    [(GroupedExperts, 3), (SharedAndBias, 3), (FusedGateUp, 2), (SortedChunks, 3)],
)
def test_grouped_gemms_of_plain_layers_may_be_sliced(fake_ranks, style, num_gemms):
    proof = judge(layer_of(style, fake_ranks), tokens())
    assert isinstance(proof, RowProof), proof
    assert (len(proof.sliceable), proof.unsliceable) == (num_gemms, ())


def test_each_expert_of_a_loop_has_its_own_rows(fake_ranks):
    proof = judge(layer_of(LoopExperts, fake_ranks), tokens())
    assert isinstance(proof, RowProof), proof
    experts = {}
    for node, expert in proof.expert_rows:
        experts.setdefault(node.target, []).append(expert)
    assert experts[operator_of(proof, "matmul")] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert experts[torch.cat] == [0, 1, 2, 3]  # not the one that joins all experts
    assert len(proof.joins) == 5  # with that one


def operator_of(proof, name):
    return next(n.target for n, _ in proof.expert_rows if n.name.startswith(name))


class ScatteredInverse(GroupedExperts):
    """Unpermutes by an inverse index that was made by a scatter of positions."""

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(rows.shape[0])
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        return torch._grouped_mm(rows[perm], self.w1 @ self.w2, offs=offs)[inverse]


class SearchedExperts(GroupedExperts):
    """Finds each row's expert by a search in the ends of runs, in a way not followed."""

    def expert_of_rows(self, rows, received):
        ends = torch.cumsum(received, 0)
        return torch.searchsorted(ends, torch.arange(rows.shape[0]), right=True) % self.local


class Activated(GroupedExperts):
    """Normalises and bounds each row by itself, in place and by heads."""

    def experts(self, rows, received):
        rows = F.rms_norm(rows, (rows.shape[1],))
        heads = rows.view(-1, 4, 4).transpose(1, 2).softmax(-1)
        rows = heads.reshape(rows.shape[0], -1).clone()
        rows.clamp_(min=-1).mul_(0.5)
        return super().experts(rows, received)


class WrittenInPlace(GroupedExperts):
    """Writes the rows back by an assignment."""

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        out = torch.zeros_like(rows)
        out[perm] = torch._grouped_mm(rows[perm], self.w1 @ self.w2, offs=offs)
        return out


class NormPerExpert(LoopExperts):
    """Each expert has its own norm weight and bias."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.norm = nn.Parameter(rand(self.local, width))
        self.bias = nn.Parameter(rand(self.local, width))

    def experts(self, rows, received):
        counts, self._counts = self._counts, None
        parts = torch.split(rows, counts)
        done = []
        for i, part in enumerate(parts):
            e = i % self.local
            done.append(
                F.linear(F.layer_norm(part, (WIDTH,), self.norm[e]), self.eye, self.bias[e])
            )
        return torch.cat(done)

    @property
    def eye(self):
        return torch.eye(WIDTH, dtype=self.norm.dtype)


@pytest.mark.parametrize(
    "style",
    [ScatteredInverse, SearchedExperts, Activated, WrittenInPlace, NormPerExpert],
    ids=lambda s: s.__name__,
)
def test_other_ways_to_write_the_same_are_proven(fake_ranks, style):
    proof = judge(layer_of(style, fake_ranks), tokens())
    assert isinstance(proof, RowProof), proof


@pytest.fixture
def titan(fake_ranks, monkeypatch):
    """torchtitan's layer, its kernel replaced: `titan(use_grouped_mm, indices)`."""
    titan_layer = pytest.importorskip("tests.proof.titan_layer", reason="needs torchtitan")

    def make(use_grouped_mm, indices="permute_indices"):
        replaced = getattr(titan_layer, indices)
        monkeypatch.setattr("torchtitan.models.moe.utils.generate_permute_indices", replaced)
        return titan_layer.TitanExperts(WIDTH, 32, 8, 2, fake_ranks, use_grouped_mm)

    return make


@pytest.mark.parametrize(
    "indices",
    slow_but(["permute_indices_by_kernel"], ["permute_indices", "permute_indices_by_kernel"]),
)
def test_torchtitans_padded_groups_are_proven_and_sliced_but_for_their_padding(titan, indices):
    proof = judge(titan(True, indices), tokens(torch.float32))
    assert isinstance(proof, RowProof), proof
    assert len(proof.sliceable) == 3 and proof.unsliceable == ()
    assert [proof.padding[gemm] for gemm in proof.sliceable] == [(8, 8, 8, 8)] * 3


@pytest.mark.slow
def test_a_higher_order_operator_may_write_what_it_makes_of_counts(titan):
    """On a GPU the indices are written by a kernel inside a higher-order operator."""
    (graph,) = (
        gm.graph
        for gm in dynamo_graphs(titan(True, "permute_indices_by_kernel"), tokens(torch.float32))
    )
    (call,) = (n for n in graph.nodes if "fill_indices" in str(n.target))
    counts, starts, indices = call.args
    with graph.inserting_before(call):
        ends = graph.call_function(torch.cumsum, (counts, 0))
        run_starts = graph.call_function(torch.sub, (ends, counts))
        for node, value in ((ends, counts), (run_starts, counts)):
            node.meta["example_value"] = value.meta["example_value"].clone()
        wrapper = graph.call_function(
            triton_kernel_wrapper_mutation,
            kwargs=kernel_call(counts, run_starts, starts, indices),
        )
    graph.erase_node(call)
    ((region,), _) = find_moe_regions(GraphFacts(graph))
    assert wrapper in region.body
    proof = prove_rows_independent(region)
    if isinstance(proof, Left) and "only 0-dimensional arrays" in proof.detail:
        pytest.skip("this release of Triton interprets no kernel with this release of numpy")
    assert isinstance(proof, RowProof), proof
    assert proof.sampled == 204


def kernel_call(counts, run_starts, starts, indices):
    """Return the arguments of torchtitan's own kernel in a graph, for two ranks of four experts."""
    kernels = pytest.importorskip("torchtitan.models.moe.kernels", reason="needs triton")
    names = ("tokens_per_expert_group", "start_index_values", "write_offsets", "output")
    tensors = (counts, run_starts, starts, indices)
    constants = {"experts_per_rank": 4, "num_ranks": 2, "BLOCK_SIZE": 128}
    return {
        "kernel_idx": kernel_side_table.add_kernel(kernels._fill_indices_kernel),
        "constant_args_idx": kernel_side_table.add_constant_args(constants),
        "grid": [(4,)],
        "tma_descriptor_metadata": {},
        "kwargs": dict(zip((f"{name}_ptr" for name in names), tensors, strict=True)),
    }


def test_torchtitans_loop_has_padding_left_when_an_expert_has_no_rows(titan):
    proof = judge(titan(False), tokens(torch.float32))
    assert isinstance(proof, RowProof), proof
    assert proof.expert_rows == ()
