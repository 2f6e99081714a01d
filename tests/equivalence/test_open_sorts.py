"""Experts whose sort leaves the order of rows open: in chunks by request, with a stable sort."""

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F

from moe_compile.graph.torch_calls import is_open_sort, make_stable
from moe_compile.journal.reasons import Reason
from moe_compile.regions.regions import RowProof
from tests.equivalence.test_shared_parameters import outcome, proof_of
from tests.layers import Routed
from tests.slow_parameters import slow_but

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
            self.terms |= {"h": [h.detach().double()], "ends": offs.tolist()}
            out.register_hook(lambda g: self.terms["g"].append(g.double()))
        return torch.zeros_like(out).index_copy(0, perm, out)


class Open(Sorted):
    """The same, by a sort that is not stable."""

    order = staticmethod(OPEN["argsort"])


@pytest.mark.parametrize("chunks", slow_but([2], [2, 3]))
def test_chunks_compute_what_a_stable_sort_does(mirrored_ranks, chunks):
    stable = mirrored_ranks.run(outcome, Sorted, "eager", "exact")
    chunked = mirrored_ranks.run(outcome, Open, "megamoe", "bounded", chunks)
    for (expected, _, _), (found, _, ((verdict, *remarks),)) in zip(stable, chunked, strict=True):
        assert verdict == "chunked"
        assert any("test_open_sorts.py" in r and "m eps times" in r for r in remarks)
        assert {n for n in expected if not torch.equal(expected[n], found[n])} == set()


@pytest.mark.slow
def test_gradients_keep_the_bound_of_the_order_that_torch_chose(mirrored_ranks):
    plain = mirrored_ranks.run(outcome, Open, "eager", "exact")
    chunked = mirrored_ranks.run(outcome, Open, "megamoe", "bounded")
    for (expected, terms, _), (found, _, _) in zip(plain, chunked, strict=True):
        assert torch.equal(expected["output"], found["output"])
        (h,), (g,) = terms["h"], terms["g"]
        eps, start = torch.finfo(torch.bfloat16).eps, 0
        for expert, end in enumerate(terms["ends"]):
            rows = slice(start, end)
            sums = h[rows].abs().T @ g[rows].abs()
            off = (expected["w2"][expert].double() - found["w2"][expert].double()).abs()
            assert torch.all(off <= (end - start) * eps * sums)
            start = end


def test_a_region_is_whole_and_keeps_its_bits_where_nothing_may_round(mirrored_ranks):
    plain = mirrored_ranks.run(outcome, Open, "eager", "exact")
    for (expected, _, _), (found, _, ((verdict, *said),)) in zip(
        plain, mirrored_ranks.run(outcome, Open, "megamoe", "exact"), strict=True
    ):
        assert Reason.UNSTABLE_SORT.value in verdict
        assert "megamoe.numerics = 'bounded' allows this change of order" in verdict
        assert any("stable=True" in sentence for sentence in said)
        assert all(torch.equal(expected[n], found[n]) for n in expected)


@pytest.mark.parametrize("spelling", slow_but([*OPEN][::3], OPEN))
def test_every_spelling_is_found(fake_ranks, spelling):
    style = type("Spelled", (Sorted,), {"order": staticmethod(OPEN[spelling])})
    proof = proof_of(style, fake_ranks, "bounded")
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

    proof = proof_of(UndoneBySort, fake_ranks, "bounded")
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
    verdict = proof_of(LessTheFirstRow, fake_ranks, "bounded")
    refused = (Reason.UNSTABLE_SORT, Reason.ROWS_MIXED)  # torch 2.11 knows no length of `part[:1]`
    assert getattr(verdict, "reason", verdict) in refused
    assert "bounded" not in verdict.detail


def test_a_sort_into_given_tensors_is_left():
    graph = fx.Graph()
    labels, values, order = map(graph.placeholder, ("labels", "values", "order"))
    given = graph.call_function(torch.sort, (labels,), {"out": (values, order)})
    assert not is_open_sort(given)
