"""Parameters that rows of several experts read: in chunks by request, gradients by a bound."""

from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from moe_compile.journal.reasons import Reason
from moe_compile.regions.regions import RowProof
from moe_compile.report.process_report import REPORT
from passes.detect_regions import DetectRegions
from tests.capture import dynamo_graphs, state
from tests.layers import GroupedExperts, LoopExperts
from tests.slow_parameters import slow_but

WIDTH, HIDDEN, EXPERTS, TOP_K = 16, 24, 6, 2
SHARED = ("gain", "scale", "shift")


class Shares(GroupedExperts):
    """A norm in front of all experts, a scale and a bias of all."""

    terms = None

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.gain = nn.Parameter(1 + rand(width) / 8)
        self.scale = nn.Parameter(1 + rand(()) / 8)
        self.shift = nn.Parameter(rand(width) / 8)

    def experts(self, rows, received):
        normed = F.rms_norm(rows, (rows.shape[1],), self.gain)
        out = super().experts(normed * self.scale, received)
        shifted = out + self.shift
        if self.terms is not None:
            self.note(rows, normed, shifted)
        return shifted

    def note(self, rows, normed, shifted):
        """Keep the terms of the gradients of what is shared, in float64, once these are known."""
        plain = F.rms_norm(rows.detach().double(), (rows.shape[1],))
        normed.register_hook(lambda g: self.terms["gain"].append(g.double() * plain))
        shifted.register_hook(lambda g: self.terms["shift"].append(g.double()))


class SharesInLoop(LoopExperts):
    """Each expert of a loop has the same norm."""

    terms = None
    note = Shares.note

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.gain = nn.Parameter(1 + rand(width) / 8)

    def experts(self, rows, received):
        counts, self._counts = self._counts, None
        done = []
        for i, part in enumerate(torch.split(rows, counts)):
            normed = F.rms_norm(part, (rows.shape[1],), self.gain)
            done.append(F.silu(normed @ self.w1[i % self.local]) @ self.w2[i % self.local])
            if self.terms is not None:
                self.note(part, normed, done[-1])
        return torch.cat(done)


def outcome(rank, style, backend, numerics, chunks=2):
    """Return a step's tensors by name, the terms of gradients, and the region's report."""
    torch._dynamo.reset()
    before = len(REPORT.compilations)
    layer = style(WIDTH, HIDDEN, EXPERTS, TOP_K, dist.group.WORLD)
    run = layer
    if backend == "megamoe":
        options = {"megamoe.codegen": "fx", "megamoe.chunks": chunks, "megamoe.numerics": numerics}
        run = torch.compile(layer, backend=backend, options=options)
    else:
        layer.terms = defaultdict(list)
    own = torch.Generator().manual_seed(rank)
    x = torch.randn(90 + rank, WIDTH, generator=own).bfloat16().requires_grad_()
    out = run(x)
    out.float().square().sum().backward()
    tensors = {"output": out.detach(), "input": x.grad}
    gradients = {name: weight.grad for name, weight in layer.named_parameters()}
    tensors |= {name: gradient for name, gradient in gradients.items() if gradient is not None}
    regions = [r for c in REPORT.compilations[before:] for r in c.regions]
    return tensors, layer.terms, [(r.verdict, *r.remarks, *r.to_do) for r in regions]


@pytest.mark.parametrize("style", slow_but([Shares], [Shares, SharesInLoop]))
def test_gradients_of_what_is_shared_keep_the_bound_and_all_else_its_bits(mirrored_ranks, style):
    plain = mirrored_ranks.run(outcome, style, "eager", "exact")
    chunked = mirrored_ranks.run(outcome, style, "megamoe", "bounded")
    for (expected, terms, _), (found, _, ((verdict, *remarks),)) in zip(
        plain, chunked, strict=True
    ):
        assert verdict == "chunked"
        said = [r for r in remarks if "(m + 1) eps" in r]
        shared = [name for name in SHARED if name in expected]
        assert all(any(name in r for r in said) for name in shared)
        assert expected.keys() == found.keys()
        differing = {n for n in expected if not torch.equal(expected[n], found[n])}
        assert differing <= {*SHARED}
        for name in expected.keys() & terms:
            of_rows = torch.cat(terms[name])
            eps = torch.finfo(expected[name].dtype).eps
            bound = (of_rows.shape[0] + 1) * eps * of_rows.abs().sum(0)
            exact = of_rows.sum(0)
            assert torch.all((found[name].double() - expected[name].double()).abs() <= bound)
            assert torch.all((found[name].double() - exact).abs() <= bound)


def test_they_keep_a_region_whole_where_no_bit_may_change(mirrored_ranks):
    for _, _, ((verdict, *said),) in mirrored_ranks.run(outcome, Shares, "megamoe", "exact"):
        assert Reason.SHARED_PARAMETER.value in verdict
        assert "megamoe.numerics = 'bounded' allows this change of order" in verdict
        assert any("numerics" in sentence for sentence in said)


class MadeOfTokens(Shares):
    """Its scale is made of the tokens: their gradient would round otherwise too."""

    def forward(self, x):
        self._made = x.float().mean().to(x.dtype)
        return super().forward(x)

    def experts(self, rows, received):
        made, self._made = self._made, None
        return GroupedExperts.experts(self, rows * made, received)


class OneMatrix(Shares):
    """All rows are multiplied by one matrix, which rounds by their number."""

    def experts(self, rows, received):
        mixed = rows @ self.w1[0, :, :WIDTH]
        return GroupedExperts.experts(self, mixed, received)


class Exponent(Shares):
    """The gradient of an exponent is no sum of products."""

    def experts(self, rows, received):
        return GroupedExperts.experts(self, rows.abs() ** self.scale, received)


class FunctionOfShared(Shares):
    """What rows read is computed of what is shared, for each chunk anew."""

    def experts(self, rows, received):
        return GroupedExperts.experts(self, rows * self.scale.exp(), received)


def proof_of(style, group, numerics):
    x = torch.randn(32, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(style(WIDTH, HIDDEN, EXPERTS, TOP_K, group), x)
    ours = state(chunks=2, numerics=numerics)
    DetectRegions().run(gm.graph, ours)
    (found,) = ours.found.experts
    return found.proof


def test_a_proof_names_what_is_shared(fake_ranks):
    proof = proof_of(Shares, fake_ranks, "bounded")
    assert isinstance(proof, RowProof), proof
    names = " ".join(node.name for node in proof.shared)
    assert len(proof.shared) == 3 and all(name in names for name in SHARED)


@pytest.mark.parametrize(
    "style", slow_but([OneMatrix], [MadeOfTokens, OneMatrix, Exponent, FunctionOfShared])
)
def test_what_more_than_a_sum_of_terms_depends_on_stays_refused(fake_ranks, style):
    verdict = proof_of(style, fake_ranks, "bounded")
    assert getattr(verdict, "reason", verdict) is Reason.SHARED_PARAMETER
    assert "bounded" not in verdict.detail
