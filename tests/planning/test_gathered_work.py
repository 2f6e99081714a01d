"""What the planner prices where tokens are gathered is what the switched graph does."""

import collections
import dataclasses

import pytest
import torch

from moe_compile.analysis.token_rows import find_token_rows
from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.query import is_all_gather, is_launch, is_reduce_scatter, tensor_of
from moe_compile.hardware import load_profile
from moe_compile.planning.candidates import Candidate, list_candidates
from moe_compile.planning.choose_plan import extra_bytes
from moe_compile.planning.cost_model import estimate_costs
from moe_compile.planning.decide import experts_rule
from moe_compile.planning.gathered_sizes import GatheredSizes, GatheredWay
from moe_compile.planning.rates import Rates
from moe_compile.planning.read_regions import work_of_experts
from moe_compile.planning.region_tasks import price_us
from moe_compile.planning.rewrite_costs import PLACE_KERNELS
from moe_compile.planning.sizes import NominalSizes
from passes.detect_regions import DetectRegions
from tests.capture import dynamo_graphs, state
from tests.dispatch_layers import InOrder, InOrderWeighted, OntoTokens
from tests.layers import GroupedExperts

WIDTH, HIDDEN, EXPERTS, TOKENS = 16, 24, 8, 32
ROOM = 2.0
GATHERED = Candidate(dispatch="all_gather")


def program(style, group, top_k=2):
    return style(WIDTH, HIDDEN, EXPERTS, top_k, group)


def tokens():
    return torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)


def both_works(style, group, room=1.0, top_k=2):
    """Return the work of either dispatch."""
    work, _ = work_and_way(style, group, room, top_k)
    return work, work.gathered


@pytest.fixture(scope="module")
def gatherable(fake_ranks):
    return work_and_way(GroupedExperts, fake_ranks, 1.0, 2)


def work_and_way(style, group, room, top_k):
    (gm,) = dynamo_graphs(program(style, group, top_k), tokens())
    ours = state()
    DetectRegions().run(gm.graph, ours)
    (found,) = ours.found.experts
    way = GatheredWay(region=found.region, found=find_token_rows(found.region), room=room)
    return work_of_experts(found.region, found.proof, [], way), way


def crossing(graph, num_ranks):
    """Return, per all-gather and reduce-scatter, the bytes that leave a rank."""
    found = collections.Counter()
    for node in graph.nodes:
        if is_launch(node):
            assert is_all_gather(node) or is_reduce_scatter(node)
            (sent,) = node.all_input_nodes
            nbytes = sent.meta["val"].nbytes * (num_ranks - 1)
            found[nbytes if is_all_gather(node) else nbytes // num_ranks] += 1
    return found


@pytest.mark.parametrize("style", [InOrder, InOrderWeighted, OntoTokens])
def test_what_leaves_a_rank_is_to_the_byte_what_the_switched_graph_sends(fake_ranks, style):
    _, gathered = both_works(style, fake_ranks, ROOM)
    (gm,) = dynamo_graphs(program(style, fake_ranks), tokens())
    options = {"dispatch": "all_gather", "equal_tokens": True, "dispatch_padding": "worst"}
    compile_state, _ = rewrite(gm, state(chunks=1, strict=True, **options).config)
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    graphs = [m.graph for m in trace_both(gm, inputs, compile_state)]
    forward = collections.Counter(w.link_bytes for w in gathered.work if w.link_bytes)
    backward = collections.Counter(w.link_bytes for w in gathered.work if w.backward and w.exchange)
    assert [forward, backward] == [crossing(graph, 2) for graph in graphs]


def small_kernels(group, **options):
    """Return the operators on integers that a compiler has a kernel for, of the forward graph."""
    (gm,) = dynamo_graphs(program(GroupedExperts, group), tokens())
    compile_state, _ = rewrite(gm, state(chunks=1, equal_tokens=True, **options).config)
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    graph = trace_both(gm, inputs, compile_state)[0].graph
    machine = dataclasses.replace(load_profile("cpu"), op_overhead_us=1e6)
    sizes = NominalSizes({})
    sizes.learn(graph)
    costs = estimate_costs(graph, sizes, machine)
    launched = [n for n in graph.nodes if costs[n].compute_us >= 1e6 and not is_launch(n)]
    values = [t for n in launched if (t := tensor_of(n)) is not None]
    return sum(not t.is_floating_point() for t in values)


def test_small_kernels_are_counted_as_the_switched_graph_has_them(fake_ranks):
    """Two sums of counts, for split sizes, are priced as work that stays."""
    exchanged = small_kernels(fake_ranks)
    assert small_kernels(fake_ranks, dispatch="all_gather") == exchanged - 2 + PLACE_KERNELS


def test_experts_compute_the_rows_there_is_room_for(fake_ranks):
    """Padding is zeros that are computed like any row; the router and the tokens sent are not."""
    whole, exact = both_works(GroupedExperts, fake_ranks)
    _, padded = both_works(GroupedExperts, fake_ranks, ROOM)
    names = {w.name for w in whole.work if w.is_chunked and w.operations}
    for asked, work in ((1.0, exact), (ROOM, padded)):
        experts = {w.name: w.operations for w in work.work if w.name in names}
        assert experts == {w.name: asked * w.operations for w in whole.work if w.name in names}
    sent = [[w.link_bytes for w in work.work] for work in (exact, padded)]
    assert sent[0] == sent[1]
    assert padded.extra_bytes > exact.extra_bytes


@pytest.mark.parametrize("style", [InOrderWeighted, OntoTokens])
def test_no_exchange_of_the_old_form_is_left_and_needs_stand_before(fake_ranks, style):
    whole, gathered = both_works(style, fake_ranks)
    assert {w.exchange for w in whole.work} >= {"dispatch", "combine"}
    assert {w.exchange for w in gathered.work} == {"", "gathered", "routing"}
    assert all(w.is_gather for w in gathered.work if w.exchange)
    for index, work in enumerate(gathered.work):
        assert all(needed < index for needed in work.needs)


class Counts(GroupedExperts):
    """Keeps what it was told of counts, as torchtitan's layer does."""

    def exchange_counts(self, counts):
        self.received = super().exchange_counts(counts)
        return self.received


def test_a_count_exchange_that_is_read_elsewhere_is_still_paid_for(fake_ranks):
    whole, gathered = both_works(Counts, fake_ranks)
    (kept,) = (w for w in gathered.work if w.exchange == "other")
    assert kept.name in {w.name for w in whole.work}


def test_experts_wait_for_the_rows_and_the_result_for_the_sums(fake_ranks):
    _, gathered = both_works(OntoTokens, fake_ranks)
    names = [w.name for w in gathered.work]
    above = [{i} for i in range(len(names))]
    for index, work in enumerate(gathered.work):
        above[index] |= {j for needed in work.needs for j in above[needed]}
    after = {names[i] for i in above[names.index("reduce sums")]}
    assert {"gather tokens", "gather routing", "place rows", "pick rows"} <= after
    assert any(w.operations and w.is_chunked and w.name in after for w in gathered.work)
    assert names.index("reduce sums") in above[names.index("add sums")]


def test_slices_divide_the_tokens_and_need_proof_of_rows_per_token(fake_ranks):
    whole, gathered = both_works(GroupedExperts, fake_ranks)
    assert gathered.num_parts == TOKENS
    ways = [c for c in list_candidates(whole, ("experts", "tokens")) if c.dispatch == "all_gather"]
    assert [(c.num_chunks, c.chunk_by) for c in ways[1:]] == [(n, "tokens") for n in (2, 4, 8)]
    assert not ways[0].is_lossy(whole) and all(c.is_lossy(whole) for c in ways[1:])
    assert [c for c in list_candidates(whole, ("experts",)) if c in ways] == ways[:1]


@pytest.mark.parametrize(
    ("options", "is_known", "expected"),
    [
        ({"dispatch": "all_to_all"}, True, set()),
        ({"dispatch": "auto"}, True, {1}),
        ({"dispatch": "auto", "numerics": "bounded"}, True, {1}),
        ({"dispatch": "auto", "numerics": "bounded"}, False, set()),
        ({"dispatch": "auto", "numerics": "lossy"}, False, {1}),
        ({"dispatch": "all_gather"}, False, {1}),
        ({"dispatch": "auto", "numerics": "bounded", "chunk_by": "tokens"}, True, {1, 2, 4, 8}),
        ({"dispatch": "auto", "numerics": "bounded", "chunk_by": "tokens", "chunks": 4}, True, {4}),
        ({"dispatch": "auto", "combine_wire": "fp8_forward"}, True, set()),
        ({"dispatch": "auto", "numerics": "bounded", "combine_wire": "auto"}, True, {1}),
    ],
)
def test_which_ways_to_gather_options_allow(gatherable, options, is_known, expected):
    """A bound that is not known is nothing "auto" may take; who asks by name gets no other way."""
    work, way = gatherable
    if not is_known:
        way = dataclasses.replace(way, found=dataclasses.replace(way.found, rows_per_token=None))
    rule = experts_rule(MegaMoEConfig(equal_tokens=True, **options), work, way)
    allowed = [c for c in list_candidates(work, ("experts", "tokens")) if rule(c)]
    assert {c.num_chunks for c in allowed if c.dispatch == "all_gather"} == expected
    exchanged = [c for c in allowed if c.dispatch == "all_to_all"]
    assert bool(exchanged) is (options["dispatch"] != "all_gather")


RATES = Rates(
    matmul_tflops=1.0,
    memory_gb_per_s=100.0,
    op_overhead_us=0.0,
    link_gb_per_s=0.001,
    link_latency_us=0.0,
)


def test_the_price_is_that_of_gathers_at_their_own_rate(fake_ranks):
    """The link, a byte in a microsecond, is all there is to wait for."""
    whole, gathered = both_works(GroupedExperts, fake_ranks)
    sent = sum(w.link_bytes * (1.0 + w.backward) for w in gathered.work if w.exchange)
    fast = RATES.scaled("gather_share", 2.0)
    assert price_us(whole, GATHERED, RATES) == pytest.approx(sent, rel=0.01)
    assert price_us(whole, GATHERED, fast) == pytest.approx(sent / 2, rel=0.01)
    assert price_us(whole, Candidate(), fast) == price_us(whole, Candidate(), RATES)


def test_bytes_moved_in_memory_are_told_by_hand(gatherable):
    """64 rows of this rank, 64 tokens of both ranks, 32 bytes each; every sum is in bfloat16."""
    work, way = gatherable
    sizes, row, found = GatheredSizes.of(way), WIDTH * 2, {w.name: w for w in work.gathered.work}
    assert sizes.room_rows == 64
    pick, sums = found["pick rows"], found["sums per token"]
    assert pick.nbytes == 64 * row + 64 * row  # read, written
    assert pick.backward_nbytes == 64 * row + 3 * 64 * row  # read; zeros, read and written again
    assert sums.nbytes == 64 * row + 3 * 64 * row
    assert sums.nbytes * sums.backward == pytest.approx(2 * 64 * row)  # gathered


def test_memory_counts_the_tokens_of_all_ranks_and_the_padding(fake_ranks):
    """One row per token: two ranks' tokens are alive instead of one rank's rows."""
    whole, gathered = both_works(GroupedExperts, fake_ranks, top_k=1)
    tokens_bytes = TOKENS * WIDTH * 2
    assert extra_bytes(whole, Candidate()) == 0.0
    assert extra_bytes(whole, GATHERED) == gathered.extra_bytes == (2 - 1) * tokens_bytes
    slices = Candidate(num_chunks=2, chunk_by="tokens", dispatch="all_gather")
    assert extra_bytes(whole, slices) == gathered.extra_bytes + 2 * tokens_bytes
