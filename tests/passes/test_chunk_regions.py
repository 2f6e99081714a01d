"""What the graph of a chunked region holds: exchanges, host reads, side effects, weights."""

import contextlib
import importlib
import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.utils._pytree import tree_leaves

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.query import called_name, is_all_to_all, is_assertion, is_integer, tensor_of
from moe_compile.journal.reasons import Reason
from passes.pipeline import DYNAMO, run_level
from passes.replay.host_reads import CONSTRAIN_RANGE
from passes.replay.masked_replay import chunk_bounds
from tests.capture import CapturedError, carried_out, dynamo_graphs, normalized, state
from tests.layers import (
    Centred,
    FusedGateUp,
    GroupedExperts,
    KeepsSplits,
    LoopExperts,
    Routed,
    SharedAndBias,
)
from tests.megatron_layers import TwoBack
from tests.slow_parameters import slow_but

WIDTH, HIDDEN, EXPERTS, TOP_K = 16, 24, 8, 2


def chunked(program, chunks, **options):
    """Return the Dynamo graph of `program` after our passes, and what became of its chunks."""
    x = torch.randn(32, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    gm, *_ = dynamo_graphs(program, x)
    results = run_level(DYNAMO, gm.graph, state(chunks=chunks, strict=True, **options))
    return gm.graph, carried_out(results, "chunks")


def whole(program, chunks=2, of_tokens=True):
    """Return the verdicts on what is left whole in `program`, its graph, and the graph before."""
    x = torch.randn(32, WIDTH, dtype=torch.bfloat16, requires_grad=of_tokens)
    (gm,) = dynamo_graphs(program, x)
    before = str(gm.graph)
    results = run_level(DYNAMO, gm.graph, state(chunks=chunks))
    return carried_out(results, "chunks").skipped, gm.graph, before


def layer(style, group):
    return style(WIDTH, HIDDEN, EXPERTS, TOP_K, group)


def launches(graph):
    return [n for n in graph.nodes if is_all_to_all(n)]


def host_copies(graph):
    return [
        n
        for n in graph.nodes
        if n.op == "call_method" and n.target == "to" and torch.device("cpu") in n.args
    ]


@given(experts=st.integers(1, 64), chunks=st.integers(1, 64))
def test_bounds_cover_every_expert_once_with_sizes_that_differ_by_at_most_one(experts, chunks):
    chunks = min(chunks, experts)
    bounds = chunk_bounds(experts, chunks)
    assert [e for b in bounds for e in b] == list(range(experts))
    assert max(map(len, bounds)) - min(map(len, bounds)) <= 1
    assert all(e * chunks // experts == c for c, b in enumerate(bounds) for e in b)


@pytest.mark.parametrize("chunks", slow_but([3], [2, 3, 4]))
@pytest.mark.parametrize(
    "style", slow_but([GroupedExperts, LoopExperts], [GroupedExperts, LoopExperts, FusedGateUp])
)
def test_n_chunks_have_one_count_exchange_and_n_exchanges_each_way(fake_ranks, style, chunks):
    graph, report = chunked(layer(style, fake_ranks), chunks)
    assert report.applied == ("region 0",)
    counts = [n for n in launches(graph) if n.meta.get("example_value") is not None]
    assert len(launches(graph)) == 1 + 2 * chunks
    assert [is_integer(n) for n in counts] == [True]


def test_each_chunk_exchanges_all_that_travels_with_its_rows(fake_ranks):
    graph, report = chunked(layer(TwoBack, fake_ranks), 2)
    assert report.applied == ("region 0",)
    assert len(launches(graph)) == 1 + 2 * (2 + 2)
    assert len(host_copies(graph)) == 1


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_the_host_reads_once_whatever_the_number_of_chunks(fake_ranks, chunks):
    graph, report = chunked(layer(GroupedExperts, fake_ranks), chunks)
    assert len(host_copies(graph)) == 1
    assert report.measures["num_bulk_host_reads"] == 1
    (copy,) = host_copies(graph)
    for node in graph.nodes:
        if node.op == "call_method" and node.target == "item":
            assert node.args[0].target is operator.getitem
            assert node.args[0].args[0] is copy


@pytest.mark.parametrize("style", [GroupedExperts, KeepsSplits])
def test_the_host_takes_up_two_integers_per_rank_and_chunk(fake_ranks, style):
    """Splits of the whole dispatch are the sums of its chunks' splits."""
    program = layer(style, fake_ranks)
    graph, _ = chunked(program, 4)
    items = [n for n in graph.nodes if n.op == "call_method" and n.target == "item"]
    assert len(items) == 2 * program.num_ranks * 4
    checked = [n.args[0] for n in graph.nodes if n.target is CONSTRAIN_RANGE]
    assert checked == items


def forward_graph(program, chunks):
    """Return the forward graph that AOTAutograd makes of `program` in chunks."""
    found = []

    def keep(gm, inputs):
        found.append(gm)
        raise CapturedError

    def backend(gm, inputs):
        gm = next(normalized(gm))
        run_level(DYNAMO, gm.graph, state(chunks=chunks, strict=True))
        gm.recompile()
        return aot_autograd(fw_compiler=keep)(gm, inputs)

    torch._dynamo.reset()
    x = torch.randn(32, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    capture = torch._dynamo.config.patch(capture_scalar_outputs=True)
    with capture, contextlib.suppress(BackendCompilerFailed):
        torch.compile(program, backend=backend, fullgraph=True)(x)
    return found[0].graph


def test_the_rows_a_chunk_sends_or_receives_are_one_symbol(fake_ranks):
    graph = forward_graph(layer(GroupedExperts, fake_ranks), 4)
    exchanged = [tensor_of(n) for n in graph.nodes if is_all_to_all(n)][1:]
    assert len(exchanged) == 2 * 4
    assert len({str(rows.shape[0]) for rows in exchanged}) == 2 * 4
    assert all(len(rows.shape[0].node.expr.free_symbols) == 1 for rows in exchanged)


def test_no_slice_of_rows_known_at_run_time_alone_has_an_open_end(fake_ranks, monkeypatch):
    """Inductor of torch 2.11, the least version, lowers none: `KeyError: 'unbacked_bindings'`."""
    titan_layer = pytest.importorskip("tests.proof.titan_layer", reason="needs torchtitan")
    utils = importlib.import_module("torchtitan.models.moe.utils")
    monkeypatch.setattr(utils, "generate_permute_indices", titan_layer.permute_indices)
    program = titan_layer.TitanExperts(WIDTH, HIDDEN, EXPERTS, TOP_K, fake_ranks, True)
    graph, report = chunked(program.bfloat16(), 2)
    assert report.applied == ("region 0",)
    taken = [n for n in graph.nodes if n.target is operator.getitem]
    cut = [n.args[1] for n in taken if isinstance(n.args[1], slice) and n.args[1].start == 2 * 8]
    assert len(cut) == 3 and all(one.stop is not None for one in cut)


def test_all_dispatches_stand_before_the_first_expert(fake_ranks):
    graph, _ = chunked(layer(GroupedExperts, fake_ranks), 4)
    order = list(graph.nodes)
    first_gemm = next(i for i, n in enumerate(order) if n.target is torch._grouped_mm)
    _, *exchanges = launches(graph)
    assert all(order.index(n) < first_gemm for n in exchanges[:4])


def stable_sorts(graph):
    return [n for n in graph.nodes if n.target is torch.argsort and n.kwargs.get("stable")]


def test_runs_of_one_chunk_are_put_side_by_side_in_their_order(fake_ranks):
    """By a stable sort: a CPU sorts few numbers so anyway, a GPU may not."""
    whole, chunks = (chunked(layer(LoopExperts, fake_ranks), n)[0] for n in (1, 2))
    assert len(stable_sorts(chunks)) == len(stable_sorts(whole)) + 1


def test_weights_of_grouped_gemms_are_sliced_to_the_chunk(fake_ranks):
    graph, _ = chunked(layer(GroupedExperts, fake_ranks), 2)
    gemms = [n for n in graph.nodes if n.target is torch._grouped_mm]
    assert len(gemms) == 2 * 3
    for gemm in gemms:
        piece = gemm.args[1]
        assert piece.target is operator.getitem and piece.args[0].target is torch.split
        assert piece.args[0].args[1] == [2, 2]  # of four local experts


@pytest.mark.parametrize(("chunks", "num_rolled"), [(2, 1), (4, 3)])
def test_offsets_of_a_chunks_products_begin_where_inductor_copies_nothing(
    fake_ranks, chunks, num_rolled
):
    """Of four local experts, int32: all slices but the first would begin within 16 bytes."""
    graph, _ = chunked(layer(GroupedExperts, fake_ranks), chunks)
    offsets = [n.kwargs["offs"] for n in graph.nodes if n.target is torch._grouped_mm]
    rolled = [n for n in offsets if n.target is torch.as_strided]
    begins = [n.args[1].start for n in offsets if n.target is operator.getitem]
    assert len(rolled) == 3 * num_rolled and begins == [0] * 3
    assert all(n.args[0].target is torch.roll for n in rolled)


def test_a_loop_runs_only_the_experts_of_the_chunk(fake_ranks):
    whole, _ = chunked(layer(LoopExperts, fake_ranks), 1)
    graph, _ = chunked(layer(LoopExperts, fake_ranks), 4)
    products = [sum(n.target is operator.matmul for n in g.nodes) for g in (whole, graph)]
    assert products[0] == products[1]  # router and three per expert; not four times as many


def test_one_chunk_leaves_the_graph_as_it_was(fake_ranks):
    left, graph, before = whole(layer(GroupedExperts, fake_ranks), chunks=1)
    assert str(graph) == before
    assert [v.why for v in left] == ["the options leave it off (the options ask for one chunk)"]


def test_one_local_expert_leaves_the_region_whole(fake_ranks):
    alone = GroupedExperts(WIDTH, HIDDEN, 2, TOP_K, fake_ranks)
    _, report = chunked(alone, 2)
    assert [(v.reason, v.detail) for v in report.skipped] == [
        (Reason.FEW_EXPERTS, "one local expert")
    ]
    assert report.applied == ()


def test_more_chunks_than_experts_are_clamped_with_a_remark(fake_ranks):
    graph, report = chunked(layer(GroupedExperts, fake_ranks), 99)
    (left,) = report.skipped
    assert (left.reason, left.detail) == (
        Reason.FEW_EXPERTS,
        "99 chunks need as many local experts, and a rank has 4",
    )
    assert report.applied == ("region 0",)
    assert len(launches(graph)) == 1 + 2 * 4


def test_buffers_are_still_updated_once(fake_ranks):
    graph, _ = chunked(layer(SharedAndBias, fake_ranks), 2)
    added = [n for n in graph.nodes if n.op == "call_method" and n.target == "add_"]
    biased = [n for n in graph.nodes if n.target is operator.iadd]
    assert (len(added), len(biased)) == (1, 1)


def test_stashed_sizes_join_the_one_host_read(fake_ranks):
    graph, _ = chunked(layer(KeepsSplits, fake_ranks), 2)
    assert len(host_copies(graph)) == 1
    (output,) = graph.find_nodes(op="output")
    stashed = [n for n in output.all_input_nodes if n.target is torch.sym_sum]
    assert len(stashed) == 4  # two ranks, there and back: of the whole region, not of a chunk
    read = [n for n in graph.nodes if n.op == "call_method" and n.target == "item"]
    assert all(n.args[0].args[0] in host_copies(graph) for n in read)


def reads_of_host(graph):
    """Return where integers are read from, once for each integer."""
    items = [n for n in graph.nodes if n.op == "call_method" and n.target == "item"]
    return [n.args[0].args[0] if n.args[0].target is operator.getitem else n for n in items]


class CountsRows(KeepsSplits):
    """Adds the number of rows it receives to a buffer, between the exchanges."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def experts(self, rows, received):
        self.seen.add_(self.got[0])
        return super().experts(rows, received)


def test_the_one_host_read_stands_before_what_writes_its_integers(fake_ranks):
    graph, report = chunked(layer(CountsRows, fake_ranks), 2)
    assert report.applied == ("region 0",)
    assert {*reads_of_host(graph)} == {*host_copies(graph)}


class WritesTotals(GroupedExperts):
    """Turns the number of rows per expert round after labels were made of it."""

    def experts(self, rows, received):
        totals = received.view(self.num_ranks, -1).sum(0)
        labels = torch.repeat_interleave(
            torch.arange(self.local), totals, output_size=rows.shape[0]
        )
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        totals.copy_(totals.flip(0))
        ends = totals.tolist()
        parts = torch.split(rows[perm] + self.w2[:, 0][labels], ends[::-1])
        done = torch.cat([part @ self.w1[e] @ self.w2[e] for e, part in enumerate(parts)])
        return torch.zeros_like(rows).index_copy(0, perm, done)


class WritesAfterCopyToHost(WritesTotals):
    """Turns it round after it was copied to the host."""

    def experts(self, rows, received):
        totals = received.view(self.num_ranks, -1).sum(0)
        kept = totals.to("cpu", copy=True)
        sizes = kept.tolist()
        totals.copy_(totals.flip(0))
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        ids, num_rows = torch.arange(self.local), rows.shape[0]
        for counts in (kept, totals.flip(0)):
            labels = torch.repeat_interleave(ids, counts, output_size=num_rows)
            rows = rows + self.w2[:, 0][labels][torch.argsort(perm)]
        parts = torch.split(rows[perm], sizes)
        done = torch.cat([part @ self.w1[e] @ self.w2[e] for e, part in enumerate(parts)])
        return torch.zeros_like(rows).index_copy(0, perm, done)


class ScalesItsBias(GroupedExperts):
    """Adds a bias picked by the labels, then its triple, to the rows."""

    def experts(self, rows, received):
        bias = self.w2.detach()[:, 0][self.expert_of_rows(rows, received)]
        y = super().experts(rows + bias, received)
        bias.mul_(3)
        return y + bias


class SplitsRows(GroupedExperts):
    """Splits rows by expert in sizes that the host reads round a write of what it reads."""

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        totals = received.view(self.num_ranks, -1).sum(0)
        parts = torch.split(rows[perm], self.sizes(totals))
        done = torch.cat([part @ self.w1[e] @ self.w2[e] for e, part in enumerate(parts)])
        return torch.zeros_like(rows).index_copy(0, perm, done)


class ReadsThenWrites(SplitsRows):
    """What is read first is written before the last read."""

    def sizes(self, totals):
        totals = totals.clone()
        first = totals[:2].tolist()
        totals.add_(1)
        return [*first, totals[2].item() - 1, totals[3].item() - 1]


class WritesAfterAReadOfIt(SplitsRows):
    """What needs a read integer reads before a write that needs none."""

    def sizes(self, totals):
        read = totals.tolist()
        totals = totals.clone()
        more = totals + read[0]
        totals.add_(1)
        return [more[0].item() - read[0], *(totals[e].item() - 1 for e in range(1, self.local))]


OVERTAKING = [
    WritesTotals, WritesAfterCopyToHost, ScalesItsBias, ReadsThenWrites, WritesAfterAReadOfIt,
]  # fmt: skip


@pytest.mark.parametrize("style", OVERTAKING)
def test_a_write_that_would_run_before_a_reader_leaves_the_region_whole(fake_ranks, style):
    """What the host reads, and all that is computed from counts, is made first in a chunk."""
    (verdict,), *_ = whole(layer(style, fake_ranks))
    assert verdict.reason is Reason.MUTATED_MEANWHILE, verdict
    assert "would write a tensor before" in verdict.detail


class WritesWhatWasRead(SplitsRows):
    """Takes an integer the host has read from a tensor, then reads that."""

    def sizes(self, totals):
        read = totals.tolist()
        ends = totals.cumsum(0)
        ends.sub_(read[0])
        return [read[0], ends[1].item(), *read[2:]]


def test_what_a_write_of_a_read_integer_changes_is_read_after_it(fake_ranks):
    graph, report = chunked(layer(WritesWhatWasRead, fake_ranks), 2)
    assert report.applied == ("region 0",)
    order = list(graph.nodes)
    for write in (n for n in order if n.target == "sub_"):
        reads = [n for n in write.args[0].users if n.target is operator.getitem]
        assert reads and all(order.index(write) < order.index(n) for n in reads)


class WritesAtTheEnd(GroupedExperts):
    """Writes, in place, labels, rows and a bias that it has no more use for; hands some out."""

    handed_out = ()

    def expert_of_rows(self, rows, received):
        self._labels = super().expert_of_rows(rows, received)
        return self._labels

    def experts(self, rows, received):
        bias = self.w2.detach()[:, 0][super().expert_of_rows(rows, received)]
        shifted = rows.detach() + bias
        out = super().experts(rows + shifted, received)
        labels, self._labels = self._labels, None
        labels.view(-1)[:4].clamp_(max=2)
        bias[0] = 1
        shifted.mul_(2)
        made = {"labels": labels, "bias": bias, "rows": shifted}
        self.kept = [made[name] for name in self.handed_out]
        return out


def test_what_nobody_reads_once_it_is_written_is_not_written_any_more(fake_ranks):
    graph, report = chunked(layer(WritesAtTheEnd, fake_ranks), 2)
    assert report.applied == ("region 0",)
    assert not [n for n in graph.nodes if n.target in ("clamp_", "mul_", operator.setitem)]


@pytest.mark.parametrize("name", ["labels", "rows"])
def test_what_is_read_once_it_is_written_stays(fake_ranks, name):
    """Labels are made of counts, which stay; rows that are handed out keep the region whole."""
    style = type("HandsOut", (WritesAtTheEnd,), {"handed_out": (name,)})
    left, graph, _ = whole(layer(style, fake_ranks))
    assert [v.reason for v in left] == ([Reason.ESCAPES] if name == "rows" else [])
    kept = {"labels": "clamp_", "rows": "mul_"}[name]
    assert [n.target for n in graph.nodes if n.target in ("clamp_", "mul_")].count(kept) == 1


class GivesNumberOfRows(GroupedExperts):
    """Gives out how many rows came, as their tensor has it."""

    def experts(self, rows, received):
        self.num_rows = rows.shape[0]
        return super().experts(rows, received)


def test_the_number_of_rows_asked_for_outside_is_read_off_the_counts(fake_ranks):
    graph, report = chunked(layer(GivesNumberOfRows, fake_ranks), 2)
    assert report.applied == ("region 0",)
    assert {*reads_of_host(graph)} == {*host_copies(graph)}


class Scaled(KeepsSplits):
    """Experts whose rows are scaled by a tensor made elsewhere."""

    scale = 1.0

    def experts(self, rows, received):
        return super().experts(rows * self.scale, received)


def test_what_another_region_reads_is_made_by_integers_of_the_first(fake_ranks):
    """Both are rewritten at once: what only the second reads was taken for unneeded."""
    first, second = (layer(Scaled, fake_ranks) for _ in range(2))

    def program(x):
        y = first(x)
        second.scale = torch.full((WIDTH,), first.got[0], dtype=x.dtype)
        z = second(y + x)
        second.scale = 1.0
        return z

    graph, report = chunked(program, 2)
    assert report.applied == ("region 0", "region 1")
    made = [n for n in graph.nodes if n.target is torch.full]
    assert len(made) == 1 and made[0].users


class InTwoSteps(GroupedExperts):
    """Routes one tensor, and later sends the rows of another."""

    def begin(self, x):
        self.scores, chosen = self.route(x)
        flat = chosen.reshape(-1)
        self.order = torch.argsort(flat, stable=True)
        self.counts = (flat[:, None] == torch.arange(self.num_experts)).sum(0)
        self.sent = self.counts.view(self.num_ranks, -1).sum(1).tolist()

    def finish(self, x):
        received = self.exchange_counts(self.counts)
        got = received.view(self.num_ranks, -1).sum(1).tolist()
        rows = all_to_all_single_autograd(x[self.order // TOP_K], got, self.sent, self.group)
        out = self.experts(rows, received)
        out = all_to_all_single_autograd(out, self.sent, got, self.group)
        out = out * self.scores.reshape(-1)[self.order][:, None].to(out.dtype)
        return torch.zeros_like(x).index_add(0, self.order // TOP_K, out)


def test_an_integer_that_an_earlier_region_reads_stays_where_it_is_read(fake_ranks):
    """The later region's one read served it, behind the new form of the earlier one."""
    first, second = layer(Scaled, fake_ranks), layer(InTwoSteps, fake_ranks)

    def program(x):
        second.begin(x)
        first.scale = 1 + second.sent[0]
        y = first(x)
        first.scale = 1.0
        return second.finish(x + y)

    graph, report = chunked(program, 2)
    assert report.applied == ("region 0", "region 1")
    graph.lint()


class Limited(KeepsSplits):
    """Asserts that no more rows come than a tensor and a fraction say, which no counts imply."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("limit", torch.tensor(1000))

    def experts(self, rows, received):
        torch._check(self.got[0] <= self.limit.item())
        torch._check(self.got[0] <= 1000.5)
        return super().experts(rows, received)


def test_assertions_against_numbers_from_elsewhere_stay(fake_ranks):
    graph, report = chunked(layer(Limited, fake_ranks), 2)
    assert report.applied == ("region 0",)
    (limit,) = [n for n in reads_of_host(graph) if n.target == "item"]
    above = Dependence(graph).above
    asserted = [above([n]) for n in graph.nodes if is_assertion(n)]
    assert any(limit in nodes for nodes in asserted)
    assert any(1000.5 in n.args for nodes in asserted for n in nodes)


class LooksUpWeights(GroupedExperts):
    """One weight is looked up for each row, then read by two grouped products."""

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        x, label = rows[perm], self.expert_of_rows(rows, received)[perm]
        looked_up = torch.bmm(x[:, None], self.w1[label])[:, 0]
        gate, up = (torch._grouped_mm(y, self.w1, offs=offs) for y in (x, x.neg()))
        out = torch._grouped_mm(gate * up + looked_up, self.w2, offs=offs)
        return torch.zeros_like(out).index_copy(0, perm, out)


def test_three_terms_of_a_weight_are_added_in_their_order_or_not_at_all(fake_ranks):
    """Weights of sliced products were cut first, and so read before what stood ahead of them."""
    _, report = chunked(layer(LooksUpWeights, fake_ranks), 2)
    assert [verdict.reason for verdict in report.skipped] == [Reason.GRADIENT_ORDER]


class Frozen(LoopExperts):
    """The second expert computes without gradients."""

    def expert(self, x, e):
        return super().expert(x, e).detach() if e == 1 else super().expert(x, e)


class OfDetachedRows(LoopExperts):
    """The second expert learns, and gives its rows no gradient, though it reads their shape."""

    def expert(self, x, e):
        if e != 1:
            return super().expert(x, e)
        y = super().expert(x.detach(), e)
        return y.view_as(x) + torch.zeros_like(x)


class WithFrozenWeights(LoopExperts):
    """The second expert learns nothing, and gives its rows their gradient."""

    def expert(self, x, e):
        w1, w2 = (w[e].detach() if e == 1 else w[e] for w in (self.w1, self.w2))
        return (x @ w1).relu() @ w2


@pytest.mark.parametrize(
    ("style", "chunks", "of_tokens", "of_weights", "reason"),
    [
        (Frozen, 4, True, True, Reason.NO_GRADIENT),
        (Frozen, 4, False, True, Reason.NO_GRADIENT),
        (OfDetachedRows, 4, True, True, Reason.NO_GRADIENT),
        (Frozen, 2, True, True, None),  # the first chunk has another expert
        (Frozen, 4, False, False, None),
        (WithFrozenWeights, 4, True, True, None),
    ],
)
def test_gradients_reach_the_rows_of_every_chunk_or_of_none(
    fake_ranks, style, chunks, of_tokens, of_weights, reason
):
    """The exchanges of the chunk left the backward pass, of the rank that detached it alone."""
    program = layer(style, fake_ranks).requires_grad_(of_weights)
    left, *_ = whole(program, chunks, of_tokens)
    assert [v.reason for v in left] == ([reason] if reason else [])


def seen_as_heads(rows):
    n = rows.shape[0]
    rows = rows.view(n, 4, -1).relu().reshape(n, -1)
    rows = torch.reshape(rows.view((n, -1, 4)), (n, -1))
    return rows.reshape(shape=(n, -1))


class Reshaped(LoopExperts):
    """Experts on rows that were seen as heads, put together again in each way there is."""

    def experts(self, rows, received):
        return super().experts(seen_as_heads(rows), received)


def test_a_size_that_torch_infers_beside_that_of_the_rows_is_written_out(fake_ranks):
    """A chunk without a row failed: what is as long as nothing may have any length beside it."""
    graph, report = chunked(layer(Reshaped, fake_ranks), 2)
    assert report.applied == ("region 0",)
    calls = [n for n in graph.nodes if called_name(n) in ("view", "reshape")]
    beside_rows = [n for n in calls if any(is_symbolic(a) for a in sizes_of(n))]
    assert len(beside_rows) == 2 * 5
    assert not any(-1 in sizes_of(n) for n in beside_rows)


def sizes_of(reshape):
    return tree_leaves((reshape.args[1:], reshape.kwargs))


def is_symbolic(size):
    return isinstance(size, torch.fx.Node)


class JoinedAgain(LoopExperts):
    """Joins rows of two experts, reads one of the two again, and joins all with a padding row."""

    def splits(self, counts, received):
        return Routed.splits(self, counts, received)

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        sizes = received.view(self.num_ranks, -1).sum(0).tolist()
        parts = [self.expert(x, e) for e, x in enumerate(rows[perm].split(sizes))]
        both = torch.cat(parts[:2])
        again = both.narrow(0, sizes[0], sizes[1]) * 2
        padded = torch.cat([both, *parts[2:], rows.new_zeros(1, WIDTH)])
        doubled = torch.cat([parts[0], again, *parts[2:]])
        return torch.zeros_like(rows).index_copy(0, perm, padded[:-1] + doubled)


def test_a_join_keeps_rows_that_one_of_several_readers_needs(fake_ranks):
    """Rows of two experts, some of which the other experts' chunk reads, go into a larger join."""
    graph, report = chunked(layer(JoinedAgain, fake_ranks), 4)
    assert report.applied == ("region 0",)
    joins = [n.args[0] for n in graph.nodes if n.target is torch.cat]
    padded = [join for join in joins if join[-1].target == "new_zeros"]
    assert [len(join) for join in padded] == [2, 2, 2, 2]


def test_a_region_is_left_as_it_was_with_the_reason(fake_ranks):
    left, graph, before = whole(layer(Centred, fake_ranks))
    assert [v.reason for v in left] == [Reason.ROWS_MIXED]
    assert str(graph) == before
