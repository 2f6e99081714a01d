"""Counts of some rows alone: padding cut off at a size that is read; counts that do not fit."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

from moe_compile.report.process_report import REPORT
from moe_compile.report.region_reports import AS_WRITTEN, DOES_NOT_COMPILE
from moe_compile.testing.equivalence import differing_tensors
from moe_compile.testing.programs.choices import Cut, Padding, Sharing, Style
from moe_compile.testing.programs.grammar import Experts, Program
from moe_compile.testing.programs.run import run as run_program
from moe_compile.testing.programs.text import source_of
from moe_compile.testing.rank_pool import RankPool
from passes import rewrite_regions
from passes.replay.host_reads import forget_bindings
from tests.layers import GroupedExperts


class Padded(GroupedExperts):
    def forward(self, x):
        scores, chosen = self.route(x)
        is_padding = x[:, 0] > 0.5
        flat = torch.where(is_padding[:, None], self.num_experts, chosen).reshape(-1)
        counts = self.tally(flat)
        received = self.exchange_counts(counts)
        sent, got = self.splits(counts, received)
        order = torch.argsort(flat, stable=True)[: sum(sent)]
        rows = all_to_all_single_autograd(x[order // self.top_k], got, sent, self.group)
        out = all_to_all_single_autograd(self.experts(rows, received), sent, got, self.group)
        out = out * scores.reshape(-1)[order][:, None].to(out.dtype)
        return torch.zeros_like(x).index_add(0, order // self.top_k, out)


def build():
    return Padded(16, 24, 8, 2, dist.group.WORLD)


def fails():
    raise RuntimeError("what was rewritten does not compile")


def break_graph(graph):
    forget_bindings(graph)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(fails)


def run(rank, breaking_rank=None):
    """Return what differs from eager, and what became of the regions."""
    torch._dynamo.reset()
    before, generator = len(REPORT.compilations), torch.Generator().manual_seed(rank)
    inputs = [[torch.randn(n, 16, generator=generator).bfloat16() for _ in "xg"] for n in (24, 17)]
    with contextlib.ExitStack() as stack:
        if rank == breaking_rank:
            broken = mock.patch.object(rewrite_regions, "forget_bindings", break_graph)
            stack.enter_context(broken)
        differing = differing_tensors(build, inputs, {"megamoe.chunks": 2})
    found = [(r.verdict, r.num_chunks) for c in REPORT.compilations[before:] for r in c.regions]
    return differing, found, [line for c in REPORT.compilations[before:] for line in c.dropped]


@pytest.mark.slow
def test_rows_cut_off_at_a_size_that_is_read_are_chunked(two_ranks):
    """The cut still claimed to bind a size of its own: 'should have been constant'."""
    for differing, found, dropped in two_ranks.run(run):
        assert (differing, dropped) == ([], [])
        assert set(found) == {("chunked", 2)}


TWICE = Program(
    layers=(Experts(top_k=1, padding=Padding.SENT, style=Style.RUNS, cut=Cut.NARROWED),) * 2,
    sharing=Sharing.WEIGHTS, tokens=((3, 3),), dtype="bfloat16",
)  # fmt: skip
"""A layer that is called twice: of the second call the host's own reads are kept."""


def run_twice(rank, text, breaks):
    broken = mock.patch.object(rewrite_regions, "forget_bindings", break_graph)
    with broken if breaks else contextlib.nullcontext():
        return run_program(rank, text)


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [False, True], ids=["rewritten", "as written"])
def test_no_slice_claims_a_size_that_more_is_known_of(breaks):
    """It was known by the exchange of the second call, or by the trace that failed before."""
    with RankPool(1) as pool:
        (found,) = pool.run(run_twice, source_of(TWICE), breaks)
    assert (found.differences, found.eager_error, found.compiled_error) == ([], "", "")
    assert {*found.verdicts} == {DOES_NOT_COMPILE if breaks else "chunked"}


def test_where_one_rank_cannot_compile_what_was_rewritten_all_run_as_written(two_ranks):
    for rank, (differing, found, dropped) in enumerate(two_ranks.run(run, 1)):
        assert differing == []
        assert found[0] == ((AS_WRITTEN, DOES_NOT_COMPILE)[rank], 1)
        assert ["does not compile" in line for line in dropped[:1]] == [True] * rank


class Miscounted(GroupedExperts):
    more: int

    def tally(self, flat):
        return (super().tally(flat) + self.more).clamp(min=0)


def miscount(rank, more):
    """Return what a step ends with, eagerly and in chunks, and what the regions became."""
    torch._dynamo.reset()
    before, words = len(REPORT.compilations), []
    layer = Miscounted(16, 40, 8, 2, dist.group.WORLD)
    layer.more = more
    options = {"megamoe.chunks": 2, "megamoe.codegen": "fx"}
    for step in (layer, torch.compile(layer, backend="megamoe", options=options, fullgraph=True)):
        with pytest.raises(RuntimeError) as raised:
            step(torch.randn(24, 16, generator=torch.Generator().manual_seed(rank)).bfloat16())
        words.append(str(raised.value))
    return words, {r.verdict for c in REPORT.compilations[before:] for r in c.regions}


@pytest.mark.parametrize("more", [20, pytest.param(-1, marks=pytest.mark.slow)])
def test_counts_that_do_not_fit_the_rows_raise_eagers_words(two_ranks, more):
    """Rows are moved while counts are exchanged: an index out of range came first."""
    for (eager, compiled), verdicts in two_ranks.run(miscount, more):
        assert compiled == eager
        assert verdicts == {"chunked"}
