"""What the graph holds when tokens are gathered, and why a region keeps its all-to-all."""

import pytest
import torch

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.errors import RegionRefused
from moe_compile.graph.query import (
    is_all_gather,
    is_all_to_all,
    is_integer,
    is_launch,
    is_reduce_scatter,
    overload_name,
)
from moe_compile.journal.reasons import Reason
from passes.pipeline import DYNAMO, run_level
from tests.capture import carried_out, dynamo_graphs, state
from tests.dispatch_layers import Around, InOrder, InOrderWeighted, OntoTokens
from tests.layers import (
    FusedGateUp,
    GroupedExperts,
    KeepsSplits,
    LoopExperts,
    SegmentStarts,
    SharedAndBias,
    SortedChunks,
)
from tests.slow_parameters import slow_but

WIDTH, HIDDEN, EXPERTS, TOP_K = 16, 32, 8, 2
STATIC = (GroupedExperts, FusedGateUp, SharedAndBias, SegmentStarts)
"""Styles whose experts read nothing on the host."""
ASKED = {"dispatch": "all_gather", "equal_tokens": True}


def layer(style, group, top_k=TOP_K):
    return style(WIDTH, HIDDEN, EXPERTS, top_k, group)


def tokens(dtype=torch.bfloat16):
    return torch.randn(32, WIDTH, dtype=dtype, requires_grad=True)


def unsized():
    """Return tokens whose number the graph does not know."""
    x = tokens()
    torch._dynamo.mark_dynamic(x, 0)
    return x


def switched(program, x=None, **options):
    """Return the Dynamo graph of `program` after our passes, and the report of the switch."""
    (gm,) = dynamo_graphs(program, tokens() if x is None else x)
    results = run_level(DYNAMO, gm.graph, state(**{**ASKED, **options}))
    return gm, carried_out(results, "dispatch")


def reported(program, **options):
    """Return the report of the region of `program`, all it remarks, and the region's plan."""
    (gm,) = dynamo_graphs(program, tokens())
    compile_state, compilation = rewrite(gm, state(**options).config)
    (region,), (plan,) = compilation.regions, compile_state.plan.regions["experts"]
    return region, "; ".join(region.remarks), plan


def aot_graphs(program, x=None, asked=ASKED, **options):
    """Return the forward and the backward graph of `program` after every pass."""
    (gm,) = dynamo_graphs(program, tokens() if x is None else x)
    compile_state, _ = rewrite(gm, state(**{**asked, "strict": True, **options}).config)
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    return [m.graph for m in trace_both(gm, inputs, compile_state)]


def kinds(graph):
    return [overload_name(n).rpartition("::")[2] for n in graph.nodes if is_launch(n)]


def host_reads(graph):
    """Return what the host waits for: copies to it of what is not on it, and reads of integers."""
    return [
        n
        for n in graph.nodes
        if overload_name(n) == "aten::_local_scalar_dense" or n.target in ("item", "tolist")
    ]


@pytest.mark.parametrize("style", slow_but([SharedAndBias], STATIC))
def test_no_all_to_all_is_left_forward_or_backward(fake_ranks, style):
    forward, backward = aot_graphs(layer(style, fake_ranks))
    for graph in (forward, backward):
        assert not any(map(is_all_to_all, graph.nodes))
    assert sorted(kinds(forward)) == ["all_gather_into_tensor"] * 3 + ["reduce_scatter_tensor"]
    assert sorted(kinds(backward)) == ["all_gather_into_tensor"] + ["reduce_scatter_tensor"] * 2


@pytest.mark.parametrize(
    "style", slow_but([GroupedExperts, LoopExperts], [*STATIC, LoopExperts, SortedChunks])
)
def test_sizes_need_one_read_by_the_host(fake_ranks, style):
    gm, report = switched(layer(style, fake_ranks))
    assert report.applied == ("region 0",)
    assert not any(map(is_all_to_all, gm.graph.nodes))
    copies = {n.args[0].args[0] for n in host_reads(gm.graph)}
    assert len(copies) == 1
    (copy,) = copies
    assert copy.args[1] == torch.device("cpu")


def test_stashed_sizes_are_read_by_the_one_read(fake_ranks):
    gm, _ = switched(layer(KeepsSplits, fake_ranks))
    assert len({n.args[0].args[0] for n in host_reads(gm.graph)}) == 1
    (output,) = gm.graph.find_nodes(op="output")
    assert sum(n in host_reads(gm.graph) for n in output.all_input_nodes) == 4


def test_a_count_exchange_that_the_model_reads_elsewhere_stays(fake_ranks):
    class Counts(GroupedExperts):
        def exchange_counts(self, counts):
            self.received = super().exchange_counts(counts)
            return self.received

    gm, report = switched(layer(Counts, fake_ranks))
    assert report.applied == ("region 0",)
    assert [is_integer(n) for n in gm.graph.nodes if is_all_to_all(n)] == [True]


def test_gradients_of_tokens_are_no_gradients_of_parameters(fake_ranks):
    """`gradient_wire` rounds the latter: they too are reduced and returned."""
    program = LoopExperts(WIDTH, HIDDEN, EXPERTS, TOP_K, fake_ranks, torch.float32)
    _, backward = aot_graphs(program, tokens(torch.float32), gradient_wire="bf16_fp32_sum")
    assert kinds(backward).count("reduce_scatter_tensor") == 2
    assert not any(map(is_all_to_all, backward.nodes))


@pytest.mark.parametrize("slices", [2, 4])
def test_slices_of_tokens_share_the_exchange_of_routing(fake_ranks, slices):
    gm, _ = switched(layer(GroupedExperts, fake_ranks), chunk_by="tokens", chunks=slices)
    gathers = [n for n in gm.graph.nodes if is_all_gather(n)]
    assert len(gathers) == slices + 2  # tokens of each slice, routing, weights
    assert sum(map(is_reduce_scatter, gm.graph.nodes)) == slices
    assert len({n.args[0].args[0] for n in host_reads(gm.graph)}) == 1


def test_tokens_that_do_not_split_evenly_are_gathered_whole_and_told(fake_ranks):
    (gm,) = dynamo_graphs(layer(GroupedExperts, fake_ranks), tokens())
    asked = state(chunk_by="tokens", chunks=3, **ASKED)
    (verdict,) = carried_out(run_level(DYNAMO, gm.graph, asked), "chunks").skipped
    assert verdict.reason is Reason.GATHERED
    assert verdict.detail == "a rank's tokens are not known to split evenly into 3 slices"
    assert sum(map(is_reduce_scatter, gm.graph.nodes)) == 1


def test_a_region_may_gather_the_sums_of_another(fake_ranks):
    first, second = (layer(GroupedExperts, fake_ranks) for _ in range(2))
    gm, report = switched(lambda x: second(first(x)), strict=True)
    assert report.applied == ("region 0", "region 1")
    gathers, sums = (
        [n for n in gm.graph.nodes if f(n)] for f in (is_all_gather, is_reduce_scatter)
    )
    assert (len(gathers), len(sums)) == (6, 2)
    assert not any(map(is_all_to_all, gm.graph.nodes))
    assert all(node.graph is gm.graph for n in gathers for node in n.all_input_nodes)
    gm.graph.lint()


def test_chunks_of_experts_leave_a_gathered_region_whole_with_a_remark(fake_ranks):
    program = layer(GroupedExperts, fake_ranks)
    region, said, _ = reported(program, chunks=4, strict=True, **ASKED)
    assert (region.num_chunks, region.verdict) == (1, "all-gathered")
    assert "set chunk_by = 'tokens' to split them" in said


def test_the_report_has_bytes_both_rules_and_the_equality(fake_ranks):
    region, said, _ = reported(layer(GroupedExperts, fake_ranks), chunks=1, **ASKED)
    assert region.dispatch == "all_gather"
    assert region.dispatch_figures == {
        "rows_per_token": 2, "all_to_all_bytes": 32, "all_gather_bytes": 32,
    }  # fmt: skip
    assert region.num_host_reads == 1
    assert "k = 2 rows per token on n = 2 ranks, the rule k > n favours all-to-all" in said
    assert "the rule k > 0.75 n favours all-gather" in said
    assert "no bit changes" in said


@pytest.mark.parametrize("trained", [True, False])
def test_the_report_bounds_gradients_of_the_weights_of_a_batched_product(fake_ranks, trained):
    """They are added up over the width in another order, of a single row a token too."""

    class Weighted(InOrderWeighted):
        def summed(self, by_token, scores):
            return super().summed(by_token, scores if trained else scores.detach())

    _, said, _ = reported(layer(Weighted, fake_ranks, top_k=1), chunks=1, **ASKED)
    assert ("no bit changes" in said) is not trained
    assert (f"differ by at most {WIDTH} eps times the sum" in said) is trained


# --- when not --------------------------------------------------------------------------------


def reason(program, x=None, **options):
    """Return why the region of `program` is not switched; its graph must be as it was."""
    (gm,) = dynamo_graphs(program, tokens() if x is None else x)
    before = str(gm.graph)
    results = run_level(DYNAMO, gm.graph, state(**{"chunks": 1, **ASKED, **options}))
    report = carried_out(results, "dispatch")
    assert str(gm.graph) == before
    assert report.applied == ()
    (verdict,) = report.skipped
    return verdict.reason


@pytest.mark.parametrize(
    ("top_k", "expected"), [(1, Reason.NO_FEWER_BYTES), (2, None), (3, Reason.ROUNDS)]
)
def test_auto_without_static_sizes_follows_the_rule_and_changes_no_bit(fake_ranks, top_k, expected):
    """Of two ranks: 0.75 n is 1.5 rows per token. What cannot be priced alike is not priced."""
    program, x = layer(GroupedExperts, fake_ranks, top_k), unsized()
    if expected is None:
        _, report = switched(program, x, dispatch="auto")
        assert report.applied == ("region 0",)
    else:
        assert reason(program, x, dispatch="auto") is expected


class ReadsResult(Around):
    def total(self, x, order, out, scores):
        return super().total(x, order, out * out.cumsum(0), scores)


class NoSum(Around):
    def total(self, x, order, out, scores):
        return torch.zeros_like(x).index_copy(0, order // self.top_k, out)


class WritesTokens(Around):
    def gather(self, x, order, scores):
        x = x * 1
        rows = super().gather(x, order, scores)
        x.add_(1)
        return rows


class ChangesMode(Around):
    def total(self, x, order, out, scores):
        with torch.no_grad():
            summed = super().total(x, order, out, scores)
        return x + summed


class OtherOrder(InOrder):
    def total(self, x, order, out, scores):
        return super().total(x, order.flip(0), out, scores)


class AcrossTokens(InOrder):
    """Its last step adds rows of several tokens."""

    def summed(self, by_token, scores):
        return by_token.sum(dim=0).repeat(by_token.shape[0] // self.top_k, 1)


class FactorTwice(Around):
    """Multiplies rows by one tensor before they are sent and behind the experts."""

    def route(self, x):
        scores, chosen = super().route(x)
        return scores.reshape(-1, 1).to(x.dtype), chosen

    def gather(self, x, order, scores):
        return super().gather(x * scores.sum(), order, scores) * scores

    def total(self, x, order, out, scores):
        return torch.zeros_like(x).index_add(0, order // self.top_k, out * scores)


class FactorReadBetween(FactorTwice):
    def total(self, x, order, out, scores):
        between = scores.square().sum()
        return super().total(x, order, out, scores) + between


class FactorReadBehind(FactorTwice):
    """Reads the factor twice before rows are sent: both reads become one."""

    def gather(self, x, order, scores):
        return super().gather(x, order, scores) * scores

    def total(self, x, order, out, scores):
        summed = torch.zeros_like(x).index_add(0, order // self.top_k, out)
        return summed + scores.sum()


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        (ReadsResult, Reason.ROWS_READ),
        (ChangesMode, Reason.STATE_CHANGES),
        (OtherOrder, Reason.OTHER_INDEX),
        (AcrossTokens, Reason.NO_SUM),
        (FactorReadBetween, Reason.NOT_PROVEN),
        (FactorReadBehind, Reason.NOT_PROVEN),
    ],
)
def test_each_reason_leaves_the_graph_as_it_was(fake_ranks, style, expected):
    assert reason(layer(style, fake_ranks)) is expected


@pytest.mark.parametrize("style", [Around, InOrder, InOrderWeighted, FactorTwice])
def test_what_these_are_made_of_is_switched(fake_ranks, style):
    gm, report = switched(layer(style, fake_ranks), strict=True)
    assert report.applied == ("region 0",)
    assert not any(map(is_all_to_all, gm.graph.nodes))


def test_a_weighted_sum_of_two_rows_or_a_third_addend_is_lossy(fake_ranks):
    """Sizes are not static: there is no price that could speak for a way that rounds."""
    for style in (InOrderWeighted, OntoTokens):
        assert reason(layer(style, fake_ranks), unsized(), dispatch="auto") is Reason.ROUNDS
    _, report = switched(layer(InOrder, fake_ranks), unsized(), dispatch="auto")
    assert report.applied == ("region 0",)


def test_strict_raises_where_the_switch_was_asked_for(fake_ranks):
    (gm,) = dynamo_graphs(layer(NoSum, fake_ranks), tokens())
    with pytest.raises(RegionRefused, match="must be followed by a sum per token"):
        rewrite(gm, state(strict=True, **ASKED).config)
