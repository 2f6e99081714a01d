"""Experts whose sort leaves the order of rows open: in chunks by request, with a stable sort."""

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn.functional as F

from moe_compile.graph.open_sorts import is_open_sort, make_stable
from moe_compile.journal.reasons import Reason
from moe_compile.regions.regions import RowProof
from moe_compile.report.process_report import REPORT
from passes.detect_regions import DetectRegions
from tests.capture import dynamo_graphs, state
from tests.layers import Routed
from tests.slow_parameters import slow_but

WIDTH, HIDDEN, EXPERTS, TOP_K = 16, 24, 6, 2

OPEN = {
    "argsort": torch.argsort,
    "a method": lambda labels: labels.argsort(),
    "with a dimension": lambda labels: labels.argsort(0, False),
    "said to be open": lambda labels: torch.argsort(labels, stable=False),
    "sort": lambda labels: torch.sort(labels)[1],
    "a method with names": lambda labels: labels.sort(dim=-1, descending=False).indices,
}


class Sorted(Routed):
    """Rows sorted by the label of their expert."""

    order = staticmethod(lambda labels: torch.argsort(labels, stable=True))
    terms = None

    def experts(self, rows, received):
        perm = self.order(self.expert_of_rows(rows, received))
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        x = rows[perm]
        gate = F.silu(torch._grouped_mm(x, self.w1, offs=offs))
        h = gate * torch._grouped_mm(x, self.w3, offs=offs)
        out = torch._grouped_mm(h, self.w2, offs=offs)
        if self.terms is not None:
            self.terms["h"], self.terms["ends"] = h.detach().double(), offs.tolist()
            out.register_hook(lambda g: self.terms.update(g=g.double()))
        return torch.zeros_like(out).index_copy(0, perm, out)


class Open(Sorted):
    """The same, by a sort that is not stable."""

    order = staticmethod(OPEN["argsort"])


def run(rank, style, backend, chunks, numerics="exact"):
    """Return a step's tensors by name, terms of the gradient of `w2`, and the regions' reports."""
    torch._dynamo.reset()
    before = len(REPORT.compilations)
    layer = style(WIDTH, HIDDEN, EXPERTS, TOP_K, dist.group.WORLD)
    step = layer
    if backend == "megamoe":
        options = {"codegen": "fx", "chunks": chunks, "numerics": numerics}
        step = torch.compile(
            layer, backend=backend, options={f"megamoe.{k}": v for k, v in options.items()}
        )
    else:
        layer.terms = {}
    own = torch.Generator().manual_seed(rank)
    x = torch.randn(90 + rank, WIDTH, generator=own).bfloat16().requires_grad_()
    out = step(x)
    out.float().square().sum().backward()
    tensors = {"output": out.detach(), "input": x.grad}
    tensors |= {name: weight.grad for name, weight in layer.named_parameters()}
    regions = [r for c in REPORT.compilations[before:] for r in c.regions]
    return tensors, layer.terms, [(r.verdict, *r.remarks, *r.to_do) for r in regions]


@pytest.mark.parametrize("chunks", slow_but([2], [2, 3]))
def test_chunks_compute_what_a_stable_sort_does(two_ranks, chunks):
    stable = two_ranks.run(run, Sorted, "eager", 1)
    chunked = two_ranks.run(run, Open, "megamoe", chunks, "bounded")
    for (expected, _, _), (found, _, ((verdict, *remarks),)) in zip(stable, chunked, strict=True):
        assert verdict == "chunked"
        assert any("test_open_sorts.py" in r and "m eps times" in r for r in remarks)
        assert {n for n in expected if not torch.equal(expected[n], found[n])} == set()


@pytest.mark.slow
def test_gradients_keep_the_bound_of_the_order_that_torch_chose(two_ranks):
    plain = two_ranks.run(run, Open, "eager", 1)
    chunked = two_ranks.run(run, Open, "megamoe", 2, "bounded")
    for (expected, terms, _), (found, _, _) in zip(plain, chunked, strict=True):
        assert torch.equal(expected["output"], found["output"])
        eps, start = torch.finfo(torch.bfloat16).eps, 0
        for expert, end in enumerate(terms["ends"]):
            rows = slice(start, end)
            sums = terms["h"][rows].abs().T @ terms["g"][rows].abs()
            off = (expected["w2"][expert].double() - found["w2"][expert].double()).abs()
            assert torch.all(off <= (end - start) * eps * sums)
            start = end


def test_a_region_is_whole_and_keeps_its_bits_where_nothing_may_round(two_ranks):
    plain = two_ranks.run(run, Open, "eager", 1)
    for (expected, _, _), (found, _, ((verdict, *said),)) in zip(
        plain, two_ranks.run(run, Open, "megamoe", 2), strict=True
    ):
        assert Reason.UNSTABLE_SORT.value in verdict
        assert "megamoe.numerics = 'bounded' allows it" in verdict
        assert any("stable=True" in sentence for sentence in said)
        assert all(torch.equal(expected[n], found[n]) for n in expected)


def proof_of(style, group, numerics="bounded"):
    x = torch.randn(32, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(style(WIDTH, HIDDEN, EXPERTS, TOP_K, group), x)
    ours = state(chunks=2, numerics=numerics)
    DetectRegions().run(gm.graph, ours)
    (found,) = ours.found.experts
    return found.proof


@pytest.mark.parametrize("spelling", slow_but([*OPEN][::3], OPEN))
def test_every_spelling_is_found(fake_ranks, spelling):
    style = type("Spelled", (Sorted,), {"order": staticmethod(OPEN[spelling])})
    proof = proof_of(style, fake_ranks)
    assert isinstance(proof, RowProof), proof
    (sort,) = proof.reordered
    assert is_open_sort(sort)
    make_stable(sort)
    assert not is_open_sort(sort)
    labels = torch.arange(600) % 7 // 3
    made = sort.target(labels, *sort.args[1:], **sort.kwargs)
    order = made if isinstance(made, torch.Tensor) else made[1]
    assert torch.equal(order, torch.argsort(labels, stable=True))


def test_sorts_of_different_elements_and_stable_ones_are_left(fake_ranks):
    class UndoneBySort(Sorted):
        def experts(self, rows, received):
            perm = self.order(self.expert_of_rows(rows, received))
            return torch.tanh(rows[perm])[torch.argsort(perm)]

    proof = proof_of(UndoneBySort, fake_ranks)
    assert isinstance(proof, RowProof), proof
    assert proof.reordered == ()


class LessTheFirstRow(Open):
    """What an expert computes depends on which of its rows comes first."""

    def experts(self, rows, received):
        perm = self.order(self.expert_of_rows(rows, received))
        counts = received.view(self.num_ranks, -1).sum(0).tolist()
        done = [part - part[:1] for part in torch.split(rows[perm], counts)]
        return torch.zeros_like(rows).index_copy(0, perm, torch.cat(done))


def test_what_more_than_a_sum_depends_on_stays_refused(fake_ranks):
    verdict = proof_of(LessTheFirstRow, fake_ranks)
    refused = (Reason.UNSTABLE_SORT, Reason.ROWS_MIXED)  # torch 2.11 knows no length of `part[:1]`
    assert getattr(verdict, "reason", verdict) in refused
    assert "bounded" not in verdict.detail


def test_a_sort_into_given_tensors_is_left():
    graph = fx.Graph()
    labels, values, order = map(graph.placeholder, ("labels", "values", "order"))
    given = graph.call_function(torch.sort, (labels,), {"out": (values, order)})
    assert not is_open_sort(given)
