"""What the graph holds when rows come in two hops, and why a region keeps its all-to-all."""

import dataclasses
import functools
import operator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.cost.cost_model import estimate_costs
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import (
    group_name,
    is_all_to_all,
    is_wait,
    number_of,
    overload_name,
    tensor_of,
)
from moe_compile.hardware import Link, load_profile
from moe_compile.journal.reasons import Reason
from moe_compile.ops.quantized_rows import GATHER_QUANTIZE_PACK
from moe_compile.ops.two_hops import TOKENS_RECEIVED
from moe_compile.ops.wire_format import row_bytes
from moe_compile.report.region_reports import IN_TWO_HOPS
from moe_compile.runtime.node_groups import node_groups_of
from passes.kinds.by_counts.two_hops import against_routing
from passes.pipeline import DYNAMO, run_level
from tests.capture import carried_out, dynamo_graphs, state
from tests.dispatch_layers import (
    Around,
    InOrder,
    InOrderWeighted,
    OntoTokens,
    SharedByIndex,
    SharedInOrderWeighted,
    Unweighted,
)
from tests.layers import (
    Centred,
    FusedGateUp,
    GatheredCounts,
    GroupedExperts,
    KeepsSplits,
    LoopExperts,
    SegmentStarts,
    SharedAndBias,
    SortedChunks,
)
from tests.node_ranks import seat
from tests.passes import test_switch_dispatch
from tests.passes.test_switch_dispatch import (
    TOP_K,
    WIDTH,
    NoSum,
    WritesTokens,
    host_reads,
    layer,
    reported,
    tokens,
)
from tests.slow_parameters import slow_but

ASKED = {"nodes": "exact", "chunks": 1}
STYLES = (GroupedExperts, LoopExperts, FusedGateUp, SharedAndBias, SegmentStarts, Around)


@pytest.fixture(scope="module")
def fake_nodes(no_group_stays):
    """This process as rank 0 of four that do not exist, two to a node."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    seat(0, 2)
    return dist.group.WORLD


aot_graphs = functools.partial(test_switch_dispatch.aot_graphs, asked=ASKED)


def divided(program, **options):
    """Return the Dynamo graph of `program` after our passes, and what was done of the option."""
    (gm,) = dynamo_graphs(program, tokens())
    results = run_level(DYNAMO, gm.graph, state(**{**ASKED, **options}))
    return gm, carried_out(results, "nodes")


def exchanges(graph):
    return [node for node in graph.nodes if is_all_to_all(node)]


PARTS = (SharedByIndex, SharedInOrderWeighted)


@pytest.mark.parametrize(
    "style", slow_but([GroupedExperts, SharedByIndex], [*STYLES, InOrder, InOrderWeighted, *PARTS])
)
def test_one_read_by_the_host_and_one_exchange_of_counts_serve_both_hops(fake_nodes, style):
    gm, report = divided(layer(style, fake_nodes))
    assert report.applied == ("region 0",)
    assert len({n.args[0].args[0] for n in host_reads(gm.graph)}) == 1
    told, masks, hop_1, hop_2, factor, combine = sorted(exchanges(gm.graph), key=places(gm))
    assert group_name(told) == group_name(combine) == group_name(factor) == fake_nodes.group_name
    nodes = node_groups_of(fake_nodes.group_name)
    assert group_name(masks) == group_name(hop_1) == nodes.cross
    assert group_name(hop_2) == nodes.node


def places(gm):
    """Sort a factor in front of the combine: weights of sums travel behind it."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    combine = max(
        (n for n in place if is_all_to_all(n) and n.args[0].target == "detach"),
        key=lambda n: n.args[0].args[0].target not in ("to", "unsqueeze", "reshape"),
    )
    return lambda node: len(place) if node is combine else place[node]


def test_forward_and_backward_launch_two_hops_each_and_one_flat_exchange(fake_nodes):
    forward, backward = aot_graphs(layer(GroupedExperts, fake_nodes))
    nodes, flat = node_groups_of(fake_nodes.group_name), fake_nodes.group_name
    there, on = nodes.cross, nodes.node
    assert [group_name(n) for n in exchanges(forward)].count(flat) == 3  # table, rows, weights
    assert sorted(map(group_name, exchanges(backward))) == sorted([there, on, flat])
    rows = [tensor_of(n) for n in forward.nodes if overload_name(n) == "aten::index"]
    assert not [t for t in rows if t.dim() == 2 and number_of(t.shape[0]) == TOP_K * 32], (
        "rows are still gathered by expert, and sent nowhere"
    )


@pytest.mark.parametrize("style", slow_but([InOrder], [GroupedExperts, InOrder, InOrderWeighted]))
def test_with_sums_on_the_nodes_no_row_goes_flat(fake_nodes, style):
    """Flat go the table and the weights of rows, whose gradients come back so."""
    forward, backward = aot_graphs(layer(style, fake_nodes), nodes="rounded")
    nodes, flat = node_groups_of(fake_nodes.group_name), fake_nodes.group_name
    groups = [*map(group_name, exchanges(forward))]
    assert (groups.count(nodes.cross), groups.count(nodes.node), groups.count(flat)) == (3, 2, 2)
    groups = [*map(group_name, exchanges(backward))]
    assert (groups.count(nodes.cross), groups.count(nodes.node), groups.count(flat)) == (2, 2, 1)
    for graph in (forward, backward):
        assert not [n for n in graph.nodes if "index_add" in overload_name(n)]


def test_gradients_of_tokens_meet_in_the_order_that_they_had(fake_nodes):
    """The tokens are read where the model gathers them, before what reads them behind that."""

    class ReadsLater(Around):
        def gather(self, x, order, scores):
            rows = super().gather(x, order, scores)
            self.later = x * 3
            return rows

    gm, report = divided(layer(ReadsLater, fake_nodes), nodes="rounded")
    assert report.applied == ("region 0",)
    (received,) = (n for n in gm.graph.nodes if n.target is TOKENS_RECEIVED)
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    read = received.args[1]
    (times,) = (n for n in gm.graph.nodes if n.target is operator.mul and 3 in n.args)
    assert read.target == "view_as" and read.args[0] is times.args[0]
    assert place[read] < place[times] < place[received]


def test_splits_and_counts_that_the_model_keeps_are_those_of_the_one_read(fake_nodes):
    class Keeps(KeepsSplits):
        def exchange_counts(self, counts):
            self.received = super().exchange_counts(counts)
            return self.received

    gm, report = divided(layer(Keeps, fake_nodes))
    assert report.applied == ("region 0",)
    assert len({n.args[0].args[0] for n in host_reads(gm.graph)}) == 1
    (output,) = gm.graph.find_nodes(op="output")
    assert sum(n in host_reads(gm.graph) for n in output.all_input_nodes) == 6
    assert len(exchanges(gm.graph)) == 6  # the model's own exchange of counts is gone


def test_counts_of_all_ranks_stay_those_of_the_model(fake_nodes):
    gm, report = divided(layer(GatheredCounts, fake_nodes))
    assert report.applied == ("region 0",)
    assert any(overload_name(n).endswith("all_gather_into_tensor") for n in gm.graph.nodes)


def test_the_report_says_what_was_done(fake_nodes):
    region, said, plan = reported(layer(GroupedExperts, fake_nodes), **ASKED)
    assert (region.verdict, region.nodes) == ("dispatched in two hops", "exact")
    assert region.num_host_reads == 1
    assert "2 nodes of 2 ranks" in said and "crosses to a node once" in said
    assert (plan.nodes, plan.num_nodes, plan.num_chunks) == ("exact", 2, 1)


@pytest.mark.parametrize(
    ("style", "num_addends", "of_weights"),
    [
        (GroupedExperts, TOP_K, False),
        (OntoTokens, TOP_K + 1, False),
        (InOrderWeighted, TOP_K, True),
    ],
)
def test_the_report_states_the_bound_of_sums_on_the_nodes(
    fake_nodes, style, num_addends, of_weights
):
    region, said, plan = reported(layer(style, fake_nodes), nodes="rounded", chunks=1)
    assert (region.verdict, region.nodes, plan.nodes) == (IN_TWO_HOPS, "rounded", "rounded")
    bound = (1 + 2**-8) ** 3 - 1 + (num_addends + 2) * 2**-24
    assert f"at most {bound:.3g} times the sum of their magnitudes" in said
    assert f"sums of {num_addends} rows per token" in said and "no bit changes" not in said
    assert (f"differ by at most {WIDTH} eps" in said) is of_weights


FP8 = {"dispatch_wire": "fp8", "combine_wire": "fp8"}


@pytest.mark.parametrize("nodes", ["exact", "rounded"])
def test_in_eight_bits_tokens_are_packed_once_and_messages_handed_on(fake_nodes, nodes):
    options = {"nodes": nodes, "codegen": "fx", **FP8}
    forward, backward = aot_graphs(layer(GroupedExperts, fake_nodes), **options)
    of_nodes, num_bytes = node_groups_of(fake_nodes.group_name), row_bytes(WIDTH)
    for graph in (forward, backward):
        rows = [n for n in exchanges(graph) if tensor_of(n).dtype is torch.uint8]
        assert {tensor_of(n).shape[1] for n in rows} == {num_bytes}
        groups = [*map(group_name, rows)]
        ways = (of_nodes.cross, of_nodes.node, fake_nodes.group_name)
        assert [*map(groups.count, ways)] == ([2, 2, 0] if nodes == "rounded" else [1, 1, 1])
        packs = [n for n in graph.nodes if n.target is GATHER_QUANTIZE_PACK]
        assert len(packs) == (3 if nodes == "rounded" else 2), "a row is packed twice"
        wide = [t for n in exchanges(graph) if (t := tensor_of(n)).dim() == 2]
        assert not [t for t in wide if t.dtype is torch.bfloat16 and t.shape[1] == WIDTH]


@pytest.mark.parametrize(
    ("style", "said"),
    [
        (InOrder, "Packed are tokens, not their weighted rows, so bits differ"),
        (Around, "Packed are gradients of sums, not of weighted rows, so bits differ"),
        (Unweighted, "Rows equal those of the exchange in one hop in eight bits, bit for bit"),
    ],
)
def test_the_report_says_what_is_packed(fake_nodes, style, said):
    _, remarks, plan = reported(layer(style, fake_nodes), **ASKED, **FP8)
    assert (plan.dispatch_wire, plan.combine_wire) == ("fp8", "fp8")
    assert said in remarks and "no bit changes" not in remarks
    assert f"dispatch in fp8: {row_bytes(WIDTH)} of {2 * WIDTH} bytes per row" in remarks


@pytest.mark.parametrize(
    ("wires", "sums"),
    [
        (FP8, "results and gradients"),
        ({"dispatch_wire": "fp8"}, "gradients"),
        ({"combine_wire": "fp8_forward"}, "results"),
        ({"dispatch_wire": "fp8_forward"}, ""),
    ],
)
def test_the_report_states_the_bound_of_sums_in_eight_bits(fake_nodes, wires, sums):
    _, said, _ = reported(layer(Unweighted, fake_nodes), nodes="rounded", chunks=1, **wires)
    packed = (1 + 2**-4 + 2**-20) ** 2
    bound = packed * ((1 + 2**-8) ** 5 + (TOP_K + 2) * 2**-24) - 1
    assert (f"sums of {sums} have terms" in said) is bool(sums)
    assert (f"differ by at most {bound:.3g} times" in said) is bool(sums)


def test_without_the_pass_that_quantises_two_hops_do_not(fake_nodes):
    (gm,) = dynamo_graphs(layer(GroupedExperts, fake_nodes), tokens())
    config = state(**ASKED, **FP8, disable_passes=("quantize_exchanges",)).config
    compile_state, _ = rewrite(gm, config)
    (plan,) = compile_state.plan.regions["experts"]
    assert (plan.nodes, plan.dispatch_wire, plan.combine_wire) == ("exact", "same", "same")
    assert not [n for n in gm.graph.nodes if n.target is GATHER_QUANTIZE_PACK]


# --- in parts ----------------------------------------------------------------------------------


def by_group(graph, fake_nodes):
    """Return the numbers of rows' exchanges between nodes, inside a node, and flat."""
    nodes = node_groups_of(fake_nodes.group_name)
    groups = [
        group_name(n)
        for n in exchanges(graph)
        if (t := tensor_of(n.all_input_nodes[0])).dim() == 2 and t.shape[1] == WIDTH
    ]
    return tuple(groups.count(g) for g in (nodes.cross, nodes.node, fake_nodes.group_name))


IN_PARTS = (
    ("exact", "experts", (1, 2, 2), (1, 2, 2)),
    ("exact", "tokens", (2, 2, 1), (2, 2, 1)),
    ("exact", "both", (2, 4, 2), (2, 4, 2)),
    ("rounded", "experts", (2, 4, 0), (2, 4, 0)),
    ("rounded", "tokens", (4, 4, 0), (4, 4, 0)),
    ("rounded", "both", (4, 8, 0), (4, 8, 0)),
)


@pytest.mark.parametrize(
    ("nodes", "axis", "forward", "backward"),
    slow_but(IN_PARTS[2:3], IN_PARTS),
)
def test_hop_1_goes_in_slices_of_tokens_and_hop_2_in_chunks_of_experts(
    fake_nodes, nodes, axis, forward, backward
):
    """Experts wait for all slices: what is flat goes in one piece then."""
    cut = {"hop_slices": 2} if axis == "both" else {"chunk_by": axis}
    graphs = aot_graphs(layer(GroupedExperts, fake_nodes), nodes=nodes, chunks=2, **cut)
    assert [by_group(graph, fake_nodes) for graph in graphs] == [forward, backward]
    products = [sum("_grouped_mm" in overload_name(n) for n in graph.nodes) for graph in graphs]
    one_piece = aot_graphs(layer(GroupedExperts, fake_nodes), nodes=nodes)
    whole = [sum("_grouped_mm" in overload_name(n) for n in graph.nodes) for graph in one_piece]
    assert products == [n * (1 if axis == "tokens" else 2) for n in whole]


def test_hop_2_of_a_chunk_is_under_way_while_experts_of_the_one_before_compute(fake_nodes):
    (gm,) = dynamo_graphs(layer(GroupedExperts, fake_nodes), tokens())
    options = {**ASKED, "chunks": 2, "equal_tokens": True, "strict": True, "hardware": "h100"}
    compile_state, _ = rewrite(gm, state(**options).config)
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    nodes = node_groups_of(fake_nodes.group_name)
    for module in trace_both(gm, inputs, compile_state):
        order = [*module.graph.nodes]
        launches = [n for n in exchanges(module.graph) if group_name(n) == nodes.node]
        (waited,) = (n for n in launches[1].users if is_wait(n))
        products = [i for i, n in enumerate(order) if "_grouped_mm" in overload_name(n)]
        assert order.index(launches[1]) < products[0] < order.index(waited), (
            "the second chunk is sent before the first product and needed after it"
        )


# --- by price -----------------------------------------------------------------------------------


def by_price(fake_nodes, tmp_path, network, **options):
    """Return the report of a layer whose link between nodes has so many GB/s."""
    slow = dataclasses.replace(load_profile("cpu"), link_gb_per_s=network, link_latency_us=1.0)
    (tmp_path / "slow.toml").write_text(slow.as_toml())
    asked = {"nodes": "auto", "equal_tokens": True, "hardware": str(tmp_path / "slow.toml")}
    program = layer(GroupedExperts, fake_nodes, top_k=4)
    region, said, plan = reported(program, **{**asked, **options})
    assert region.nodes == plan.nodes
    return region, said


@pytest.mark.parametrize(
    ("numerics", "expected"), [("exact", "exact"), ("bounded", "rounded"), ("lossy", "rounded")]
)
def test_auto_goes_by_price_as_numerics_allow(fake_nodes, numerics, expected):
    """Where a node's link is fast it is rows between nodes that count."""
    (gm,) = dynamo_graphs(layer(GroupedExperts, fake_nodes, top_k=4), tokens())
    compile_state = state(nodes="auto", equal_tokens=True, chunks=1, numerics=numerics)
    fast = Link(num_ranks=2, gb_per_s=1.0, latency_us=1.0)
    slow = {"link_gb_per_s": 1e-5, "link_latency_us": 1.0}
    compile_state.hardware = dataclasses.replace(load_profile("cpu"), **slow, node=fast)
    results = run_level(DYNAMO, gm.graph, compile_state)
    assert carried_out(results, "nodes").applied == ("region 0",)
    (one,) = compile_state.plan.regions["experts"]
    assert one.nodes == expected


@pytest.mark.parametrize(("nodes", "chunks"), [("exact", 2), ("auto", 1)])
def test_parts_go_by_price_where_tokens_are_equal(fake_nodes, nodes, chunks):
    """Links are all that takes time: slices hide one under the other, chunks what goes home flat;
    sums, which wait for all chunks, gain nothing by them."""
    (gm,) = dynamo_graphs(layer(GroupedExperts, fake_nodes, top_k=4), tokens())
    compile_state = state(nodes=nodes, equal_tokens=True, chunks="auto", numerics="bounded")
    link = Link(num_ranks=2, gb_per_s=2e-5, latency_us=0.0)
    slow = {"link_gb_per_s": 1e-5, "link_latency_us": 0.0, "op_overhead_us": 0.0}
    compile_state.hardware = dataclasses.replace(load_profile("cpu"), **slow, node=link)
    run_level(DYNAMO, gm.graph, compile_state)
    (one,) = compile_state.plan.regions["experts"]
    assert one.nodes == {"exact": "exact", "auto": "rounded"}[nodes]
    assert (one.num_chunks, one.hop_slices) == (chunks, 2)
    (found,) = compile_state.regions
    chosen = found.decision.chosen.candidate
    assert (chosen.nodes, chosen.num_chunks, chosen.hop_slices) == (one.nodes, chunks, 2)


def test_auto_keeps_the_all_to_all_on_one_link_for_all(fake_nodes, tmp_path):
    """A token has three rows for other ranks; in hops one crosses, and two go on from there."""
    region, _ = by_price(fake_nodes, tmp_path, 1e-5, numerics="lossy", chunks=1)
    assert region.nodes == "off"


def test_the_report_has_times_and_rows_of_each_way(fake_nodes, tmp_path):
    """Four of eight experts, two nodes of four: 68 of 70 choices need both nodes."""
    for nodes in ("auto", "exact"):
        _, said = by_price(fake_nodes, tmp_path, 1e-3, nodes=nodes)
        once = 0.5 * 2 * (1 - 1 / 70)
        figures = (8.0, 4.0 + 2 * once, 4 * once)
        names = ("flat", "in two hops", "with sums on the nodes")
        rows = ", ".join(f"{name} {rows:.2f}" for name, rows in zip(names, figures, strict=True))
        assert f"rows of a token from node to node, forward and backward: {rows}" in said
        assert "predicted without chunking, one hop after the other: flat" in said


def test_the_scheduler_sees_both_links_and_what_they_carry(fake_nodes):
    """A hop between nodes takes the network, one inside a node its link, though both are of two
    ranks; of 32 tokens some need both nodes, two of eight experts being chosen evenly."""
    profile = load_profile("h100")
    known = {}
    for graph in aot_graphs(layer(GroupedExperts, fake_nodes)):
        sizes = NominalSizes(known)
        sizes.learn(graph)
        costs, nodes = estimate_costs(graph, sizes, profile), node_groups_of(fake_nodes.group_name)
        for launch in exchanges(graph):
            sent = tensor_of(launch.all_input_nodes[0])
            if sent.dim() < 2 or sent.shape[1] != WIDTH:
                continue
            rows, _ = sizes.shape(sent)
            rate, latency = profile.node.gb_per_s, profile.node.latency_us
            if group_name(launch) == nodes.cross:
                assert rows == round(32 * 2 * (1 - 6 / 28))
                rate, latency = profile.link_gb_per_s, profile.link_latency_us
            elif group_name(launch) == nodes.node:
                assert rows == 32 * TOP_K
            else:
                continue
            us = latency + rows * WIDTH * 2 / 2 / rate / 1e3
            assert costs[launch].link_us == pytest.approx(us, rel=0.01)


# --- when not --------------------------------------------------------------------------------


def reason(program, **options):
    """Return why the region of `program` has no hops; its graph must be as it was."""
    (gm,) = dynamo_graphs(program, tokens())
    before = str(gm.graph)
    results = run_level(DYNAMO, gm.graph, state(**{**ASKED, **options}))
    (verdict,) = carried_out(results, "nodes").skipped
    if options.get("dispatch") != "all_gather":
        assert str(gm.graph) == before
    return verdict.reason


def test_a_part_of_the_tokens_is_not_gathered(fake_nodes):
    """Other ranks have the same tokens, and would gather them as often."""
    (gm,) = dynamo_graphs(layer(SharedByIndex, fake_nodes), tokens())
    asked = state(**test_switch_dispatch.ASKED)
    (verdict,) = carried_out(run_level(DYNAMO, gm.graph, asked), "dispatch").skipped
    assert verdict.reason is Reason.ROWS_MAY_DIFFER


def test_one_node_has_nothing_to_save(fake_nodes):
    try:
        seat(0, 1)
        assert reason(layer(GroupedExperts, fake_nodes)) is Reason.NO_FEWER_BYTES
    finally:
        seat(0, 2)


def test_gathered_tokens_have_no_hops(fake_nodes):
    gathered = test_switch_dispatch.ASKED
    assert reason(layer(GroupedExperts, fake_nodes), **gathered) is Reason.GATHERED


class Unstable(Around):
    """Leaves the order of the rows of one expert open."""

    def by_expert(self, flat):
        return torch.argsort(flat)


class Descending(Around):
    """Has the rows of the last expert first: what is sent to a rank is for others."""

    def by_expert(self, flat):
        return torch.argsort(flat, descending=True, stable=True)


class Ordered(Around):
    """Its experts come of a sort, not of a topk."""

    def route(self, x):
        scores = torch.softmax((x @ self.router).float(), -1)
        scores, experts = torch.sort(scores, -1, descending=True)
        return scores[:, : self.top_k], experts[:, : self.top_k]


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        (Unstable, Reason.UNSTABLE_SORT),
        (Descending, Reason.UNSTABLE_SORT),
        (Ordered, Reason.CHOSEN_TWICE),
        (Centred, Reason.NOT_PROVEN),
        (NoSum, Reason.NO_SUM),
        (WritesTokens, Reason.WRITTEN),
        (SortedChunks, Reason.CHOSEN_TWICE),
    ],
)
@pytest.mark.parametrize("nodes", slow_but(["exact"], ["exact", "rounded"]))
def test_each_reason_leaves_the_graph_as_it_was(fake_nodes, style, expected, nodes):
    assert reason(layer(style, fake_nodes), nodes=nodes) is expected


class ReadsSums(InOrder):
    """Looks at the rows of each token before it adds them up."""

    def summed(self, by_token, scores):
        self.seen = by_token.amax()
        return super().summed(by_token, scores)


class LateScores(InOrderWeighted):
    """Reads its scores elsewhere between the dispatch and the sum: gradients would change order."""

    def experts(self, rows, received):
        out = super().experts(rows, received)
        self.seen = self.scores * 2
        return out

    def gather(self, x, order, scores):
        self.scores = scores.reshape(-1)[order].reshape(-1, 1)
        return (super().gather(x, order, scores).float() * self.scores).to(x.dtype)


@pytest.mark.parametrize(
    ("style", "expected"), [(ReadsSums, Reason.ROWS_READ), (LateScores, Reason.NOT_PROVEN)]
)
def test_sums_that_others_see_into_are_not_made_on_the_nodes(fake_nodes, style, expected):
    assert reason(layer(style, fake_nodes), nodes="rounded") is expected


def test_sums_on_the_nodes_need_a_number_of_rows_for_their_bound():
    found = SimpleNamespace(
        chosen=fx.Graph().placeholder("chosen"),
        is_chosen_once=True,
        keeps_order=True,
        rows_per_token=None,
    )
    assert against_routing(found, rounds=True) is Reason.ROWS_MAY_DIFFER


@pytest.mark.parametrize(
    ("precision", "device", "expected"),
    [("high", "cuda", Reason.TENSOR_FLOAT), ("highest", "cuda", None), ("high", "cpu", None)],
)
def test_products_of_tf32_would_round_the_weights(precision, device, expected):
    """There is no GPU here: the tracer's value of the weights says that it is on one."""
    weights = fx.Graph().placeholder("weights")
    with FakeTensorMode():
        weights.meta["example_value"] = torch.empty(5, 1, TOP_K, device=device)
    found = SimpleNamespace(
        chosen=weights,
        is_chosen_once=True,
        keeps_order=True,
        sums=SimpleNamespace(weights=weights),
    )
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert against_routing(found) is expected
    finally:
        torch.set_float32_matmul_precision(before)
