"""Two hops in eight bits: what their price assumes, against what is planned and emitted."""

import dataclasses
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.cost.amounts import amounts_of
from moe_compile.cost.rates import Rates
from moe_compile.cost.read_regions import work_of_experts
from moe_compile.cost.sizes import NominalSizes
from moe_compile.cost.traced_nodes import TracedNodes
from moe_compile.graph.query import group_name, is_all_to_all, tensor_of
from moe_compile.graph.snapshot import copy_of_graph
from moe_compile.hardware import Link, load_profile
from moe_compile.hardware.profile import read_profile
from moe_compile.journal.reasons import Reason
from moe_compile.ops.quantized_rows import GATHER_QUANTIZE_PACK
from moe_compile.ops.scaled_products import MESSAGE_ROWS, QUANTIZE_ROWS, SCALED_GROUPED_MM
from moe_compile.ops.wire_format import row_bytes
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.region_tasks import goes_in_hops, tasks_of
from moe_compile.plan.row_folds import folds_of
from moe_compile.regions.token_rows import find_token_rows
from moe_compile.runtime.node_groups import node_groups_of, register_node_groups
from passes.detect_regions import DetectRegions
from passes.kinds.by_counts.products import products_in_eight_bits
from passes.kinds.by_counts.two_hops import hop_forms, two_hops_of
from tests.capture import dynamo_graphs, state
from tests.dispatch_layers import InOrder
from tests.layers import GroupedExperts
from tests.padded_layers import PaddedGroups
from tests.slow_parameters import slow_but

EIGHT = {"dispatch_wire": "fp8", "combine_wire": "fp8"}
FREE = {"nodes": "auto", "dispatch_wire": "auto", "combine_wire": "auto", "equal_tokens": True}


@pytest.fixture(scope="module")
def group_of(no_group_stays):
    """Return groups of ranks that do not exist, whose nodes are registered."""
    dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())

    @functools.cache
    def made(ranks, nodes):
        local = ranks // nodes
        group, node = dist.new_group([*range(ranks)]), dist.new_group([*range(local)])
        register_node_groups(group, node, dist.new_group([*range(0, ranks, local)]), host="host 0")
        return group

    return made


def region_work(gm, config):
    """Return the work that the planner prices of the one region of a program."""
    compile_state = state(expert_compute=config.expert_compute)
    DetectRegions().run(gm.graph, compile_state)
    (found,) = compile_state.found.experts
    rows = find_token_rows(found.region)
    two_hops = two_hops_of(hop_forms(found, config, rows))
    nodes = TracedNodes(gm.graph, products=products_in_eight_bits(compile_state))
    work = work_of_experts(found.region, found.proof, compile_state.hardware, nodes)
    return dataclasses.replace(work, hops=two_hops.shape, weighted=two_hops.weighted)


# --- bytes ---------------------------------------------------------------------------------------

WIDTH, TOKENS = 256, 840
"""Tokens enough for whole numbers of rows to be near the mean of all choices."""


def layer(style, group):
    return style(WIDTH, 32, 16, 4, group)


def tokens():
    return torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)


def bytes_priced(work, candidate):
    """Return the bytes of rows between nodes, inside a node and flat: forward, then backward."""
    link = Link(num_ranks=2, gb_per_s=1.0, latency_us=0.0)
    free = {"link_gb_per_s": 1.0, "link_latency_us": 0.0, "op_overhead_us": 0.0, "node": link}
    rates = Rates.of(dataclasses.replace(load_profile("h100"), **free), work.num_ranks, 2)
    found = []
    for phase, tasks in zip(work.phases, tasks_of(work, candidate, rates), strict=True):
        is_forward = phase is work.forward
        flat = [
            one.link_bytes * candidate.wire_share(work, one.exchange, is_forward=is_forward)
            for one in phase
            if one.exchange in ("dispatch", "combine")
            and not goes_in_hops(one, candidate.nodes, is_forward=is_forward)
        ]
        hops = ("hop 1", "hop 2")
        sent = (sum(t.us for t in tasks if t.name.startswith(hop)) * 1e3 for hop in hops)
        found.append((*sent, sum(flat)))
    return found


def bytes_emitted(gm, group, config):
    """Return the same of the rows that launches of the rewritten graphs send."""
    compile_state, _ = rewrite(gm, config)
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    nodes, found = node_groups_of(group.group_name), []
    widths = {WIDTH: torch.bfloat16, row_bytes(WIDTH): torch.uint8}
    for module in trace_both(gm, inputs, compile_state):
        sizes = NominalSizes(compile_state.nominal_sizes)
        sizes.learn(module.graph)
        sent = dict.fromkeys((nodes.cross, nodes.node, group.group_name), 0.0)
        for node in filter(is_all_to_all, module.graph.nodes):
            rows = tensor_of(node.all_input_nodes[0])
            if rows.dim() == 2 and widths.get(rows.shape[1]) is rows.dtype:
                sent[group_name(node)] += amounts_of(node, sizes).link_bytes
        found.append(tuple(sent.values()))
    return found


WAYS = (
    (GroupedExperts, Candidate(nodes="exact")),
    (GroupedExperts, Candidate(nodes="exact", **EIGHT)),
    (GroupedExperts, Candidate(nodes="rounded", **EIGHT)),
    (InOrder, Candidate(nodes="rounded", dispatch_wire="fp8_forward", combine_wire="fp8")),
    (GroupedExperts, Candidate(nodes="exact", dispatch_wire="fp8", hop_slices=2)),
    (InOrder, Candidate(nodes="rounded", num_chunks=2, hop_slices=2, **EIGHT)),
)


@pytest.mark.parametrize(
    ("style", "way"), slow_but(WAYS[1:3], WAYS), ids=[f"{s.__name__}, {w}" for s, w in WAYS]
)
def test_a_price_has_the_bytes_of_every_hop_that_is_emitted(group_of, style, way):
    """Rows, or their messages with scales; masks, scores and the table are beside them."""
    group = group_of(4, 2)
    (gm,) = dynamo_graphs(layer(style, group), tokens())
    asked = {"nodes": way.nodes, "chunks": way.num_chunks, "hop_slices": way.hop_slices}
    wires = {"dispatch_wire": way.dispatch_wire, "combine_wire": way.combine_wire}
    config = MegaMoEConfig(**asked, **wires, strict=True, codegen="fx", hardware="h100")
    priced = bytes_priced(region_work(copy_of_graph(gm), config), way)
    for emitted, expected in zip(bytes_emitted(gm, group, config), priced, strict=True):
        assert emitted == pytest.approx(expected, rel=2e-3)


# --- rows that feed products ---------------------------------------------------------------------


def moves_priced(work, candidate):
    """Return the bytes moved from tokens to products, then those for gradients of weights."""
    rates = Rates.of(load_profile("h100"), work.num_ranks, 2)
    rates = dataclasses.replace(rates, op_overhead_us=0.0, memory_gb_per_s=1.0)
    forward, backward = tasks_of(work, candidate, rates)
    folds = folds_of(work, work.forward, candidate)
    left = sum(folds.left_of(i, work.forward[i]).nbytes for i in folds.spared)
    fed = next(one.name for one in work.forward if one.takes_messages)
    before = itertools.takewhile(lambda task: task.name != fed, forward)
    moved = (t.us * 1e3 for t in before if t.name.startswith("rows "))
    kept = (t.us * 1e3 for t in backward if t.name == "unpack" and not t.needs)
    return left + sum(moved), sum(kept)


def moves_emitted(gm, config):
    """Return the same of the nodes of the compiled graphs."""
    compile_state, _ = rewrite(gm, config)
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    forward, backward = (m.graph for m in trace_both(gm, inputs, compile_state))
    pack = next(n for n in forward.nodes if n.target is GATHER_QUANTIZE_PACK)
    kept = [n for n in backward.find_nodes(op="placeholder") if is_message(n)]
    ways = (
        (forward, [pack], SCALED_GROUPED_MM),
        (backward, kept, torch.ops.aten._grouped_mm.default),
    )
    return [bytes_between(graph, first, last, compile_state) for graph, first, last in ways]


def is_message(node):
    return (tensor := tensor_of(node)) is not None and tensor.dtype is torch.uint8


def bytes_between(graph, first, product, compile_state):
    """Return the bytes that nodes move from `first` on to the first products behind them."""
    sizes = NominalSizes(compile_state.nominal_sizes)
    sizes.learn(graph)
    below, moves = set(first), set()
    for node in graph.nodes:
        if node in below or (node.target is not product and below & {*node.all_input_nodes}):
            below.add(node)
    for node in reversed(graph.nodes):
        if node in below and any(u.target is product or u in moves for u in node.users):
            moves.add(node)
    return sum(amounts_of(node, sizes).nbytes for node in moves)


FED = (
    (GroupedExperts, Candidate(nodes="exact", dispatch_wire="fp8")),
    (PaddedGroups, Candidate(nodes="rounded", num_chunks=2, hop_slices=2, dispatch_wire="fp8")),
)


@pytest.mark.parametrize(
    ("style", "way"), slow_but(FED[1:], FED), ids=[f"{s.__name__}, {w}" for s, w in FED]
)
def test_rows_that_feed_products_are_priced_as_the_compiled_graphs_move_them(group_of, style, way):
    """Messages alone are moved on the way to products; the backward unpacks them once."""
    (gm,) = dynamo_graphs(layer(style, group_of(4, 2)), tokens())
    asked = {"nodes": way.nodes, "chunks": way.num_chunks, "hop_slices": way.hop_slices}
    asked |= {"dispatch_wire": "fp8", "expert_compute": "fp8_blockwise"}
    config = MegaMoEConfig(**asked, codegen="fx", hardware="h100")
    work = region_work(copy_of_graph(gm), config)
    for emitted, priced in zip(moves_emitted(gm, config), moves_priced(work, way), strict=True):
        assert emitted == pytest.approx(priced, rel=0.03)


# --- choices -------------------------------------------------------------------------------------


def planned(group, style, tmp_path, network, **options):
    """Return what is planned of a layer whose nodes have so many GB/s between them."""
    hardware = tmp_path / "network.toml"
    text = read_profile("h100").path.read_text()
    hardware.write_text(text.replace("{ value = 45.0,", f"{{ value = {network},"))
    (gm,) = dynamo_graphs(layer(style, group), tokens())
    config = MegaMoEConfig(**{**FREE, "hardware": str(hardware), "chunks": 1, **options})
    return rewrite(gm, config)[0].experts[0]


@pytest.mark.parametrize(
    ("numerics", "expected"),
    [
        ("exact", ("exact", "same", "same")),
        ("bounded", ("rounded", "same", "same")),
        ("lossy", ("rounded", "fp8", "fp8")),
    ],
)
def test_what_is_planned_is_what_was_priced(group_of, tmp_path, numerics, expected):
    one = planned(group_of(4, 2), InOrder, tmp_path, 0.01, numerics=numerics)
    assert (one.plan.nodes, one.plan.dispatch_wire, one.plan.combine_wire) == expected
    chosen = one.decision.chosen.candidate
    assert (chosen.nodes, chosen.dispatch_wire, chosen.combine_wire) == expected


class Whole(InOrder):
    """Drops what is behind the point of each number that it receives."""

    def experts(self, rows, received):
        return super().experts(rows * rows.long().to(rows.dtype), received)


def test_rows_that_eight_bits_do_not_hold_are_not_priced_in_eight_bits(group_of, tmp_path):
    """The form is chosen by the price of rows as they then go."""
    one = planned(group_of(4, 2), Whole, tmp_path, 0.01, numerics="lossy")
    assert (one.plan.nodes, one.plan.dispatch_wire, one.plan.combine_wire) == (
        "rounded",
        "same",
        "same",
    )
    assert one.decision.chosen.candidate.dispatch_wire == "same"
    named = {"numerics": "lossy", "dispatch_wire": "fp8", "nodes": "exact"}
    one = planned(group_of(4, 2), Whole, tmp_path, 0.01, **named)
    assert one.left["dispatch_wire"].reason is Reason.INTEGERS


def test_without_the_pass_that_quantises_none_is_priced(group_of, tmp_path):
    options = {"numerics": "lossy", "disable_passes": ("quantize_exchanges",)}
    one = planned(group_of(4, 2), InOrder, tmp_path, 0.01, **options)
    assert (one.plan.nodes, one.plan.dispatch_wire) == ("rounded", "same")


@pytest.mark.parametrize("style", slow_but([GroupedExperts], [GroupedExperts, PaddedGroups]))
def test_rows_of_two_hops_feed_products_in_eight_bits_as_they_came(group_of, style):
    """They are taken from the messages of hop 2 by one index, of their order and of experts."""
    layer = style(128, 64, 8, 2, group_of(4, 2))
    (gm,) = dynamo_graphs(layer, torch.randn(32, 128, dtype=torch.bfloat16, requires_grad=True))
    asked = {"nodes": "exact", "chunks": 2, "expert_compute": "fp8_blockwise", **EIGHT}
    ours, compilation = rewrite(gm, MegaMoEConfig(hardware="cpu", codegen="fx", **asked))
    assert [region.nodes for region in compilation.regions] == ["exact"]
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    forward, _ = trace_both(gm, inputs, ours)
    calls = [n.target for n in forward.graph.nodes]
    assert (calls.count(MESSAGE_ROWS), calls.count(QUANTIZE_ROWS)) == (2, 2)
