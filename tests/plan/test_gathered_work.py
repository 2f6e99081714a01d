"""What the planner prices where tokens are gathered is what the rewritten graph does."""

import collections
import dataclasses

import pytest
import torch

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.cost.rates import Rates
from moe_compile.cost.read_regions import work_of_experts
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import is_all_gather, is_launch, is_reduce_scatter, tensor_of
from moe_compile.plan.candidates import Candidate, list_candidates
from moe_compile.plan.choose_plan import extra_bytes
from moe_compile.plan.decide import experts_rule, wires_tried
from moe_compile.plan.dispatch_rules import rounding_of
from moe_compile.plan.region_tasks import price_us
from moe_compile.regions.token_rows import find_token_rows
from passes.detect_regions import DetectRegions
from passes.kinds.by_counts.gathering import gathered_form, gathered_work
from tests.capture import dynamo_graphs, state
from tests.dispatch_layers import InOrder, InOrderWeighted, OntoTokens
from tests.layers import GroupedExperts
from tests.slow_parameters import slow_but

WIDTH, HIDDEN, EXPERTS, TOKENS = 16, 24, 8, 32
GATHERED = Candidate(dispatch="all_gather")
GROUPED = torch.ops.aten._grouped_mm.default


def tokens(number=TOKENS):
    return torch.randn(number, WIDTH, dtype=torch.bfloat16, requires_grad=True)


def captured(style, group, top_k=2, number=TOKENS):
    (gm,) = dynamo_graphs(style(WIDTH, HIDDEN, EXPERTS, top_k, group), tokens(number))
    return gm


def priced(gm, **options):
    """Return the work of either dispatch of the one region, and how gathering rounds."""
    ours = state(dispatch="auto", numerics="bounded", equal_tokens=True, **options)
    DetectRegions().run(gm.graph, ours)
    (found,) = ours.found.experts
    regions = [found.region]
    rows = find_token_rows(found.region)
    form = gathered_form(found, regions, ours.config, rows)
    rounding = rounding_of(form.found)
    work = work_of_experts(found.region, found.proof, ours.hardware)
    gathered = gathered_work(form, found.proof, regions)
    both = dataclasses.replace(work, gathered=gathered, gather_is_bitwise=rounding.is_bitwise)
    return both, rounding


def both_works(style, group, top_k=2, **options):
    """Return the work of either dispatch."""
    work, _ = priced(captured(style, group, top_k), **options)
    return work, work.gathered


@pytest.fixture(scope="module")
def gatherable(fake_ranks):
    return priced(captured(GroupedExperts, fake_ranks))


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


@pytest.mark.parametrize("slices", slow_but([2], [1, 2]))
def test_the_schedule_counts_the_even_share_of_rows_forward_and_backward(fake_ranks, slices):
    """Nothing in the graph says how many rows a rank's experts have of the tokens it gathers."""
    gm = captured(GroupedExperts, fake_ranks)
    options = {"dispatch": "all_gather", "chunk_by": "tokens", "numerics": "bounded"}
    compile_state, _ = rewrite(gm, state(chunks=slices, equal_tokens=True, **options).config)
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    for module in trace_both(gm, inputs, compile_state):
        sizes = NominalSizes(compile_state.nominal_sizes)
        products = module.graph.find_nodes(op="call_function", target=GROUPED)
        rows = {sizes.shape(tensor_of(n.all_input_nodes[0]))[0] for n in products}
        assert TOKENS * 2 // slices in rows and 1 not in rows


@pytest.mark.parametrize(
    "style", slow_but([InOrderWeighted], [InOrder, InOrderWeighted, OntoTokens])
)
def test_what_leaves_a_rank_is_to_the_byte_what_the_rewritten_graph_sends(fake_ranks, style):
    _, gathered = both_works(style, fake_ranks)
    gm = captured(style, fake_ranks)
    options = {"dispatch": "all_gather", "equal_tokens": True}
    compile_state, _ = rewrite(gm, state(chunks=1, strict=True, **options).config)
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    graphs = [m.graph for m in trace_both(gm, inputs, compile_state)]
    sent = [collections.Counter(w.link_bytes for w in p if w.exchange) for p in gathered.phases]
    assert sent == [crossing(graph, 2) for graph in graphs]


@pytest.mark.parametrize("style", [GroupedExperts, OntoTokens])
def test_experts_compute_as_many_rows_as_after_an_all_to_all(fake_ranks, style):
    whole, gathered = both_works(style, fake_ranks)
    for phase, phase_as_written in zip(gathered.phases, whole.phases, strict=True):
        of_experts = sum(w.operations for w in phase if w.is_chunked)
        assert of_experts == sum(w.operations for w in phase_as_written if w.is_chunked)
    assert extra_bytes(whole, GATHERED) > 0


def test_all_that_gathered_tokens_add_is_divided_by_slices_but_what_is_told_of_the_routing(
    fake_ranks,
):
    whole, gathered = both_works(OntoTokens, fake_ranks)
    assert {w.exchange for w in whole.forward} >= {"dispatch", "combine"}
    launches = [w for w in gathered.forward if w.exchange]
    assert {w.exchange for w in launches} == {"other"} and all(w.is_gather for w in launches)
    assert [w.is_chunked for w in launches].count(False) == 1
    assert all(w.is_chunked for w in gathered.backward if w.exchange)


class Counts(GroupedExperts):
    """Keeps what it was told of counts, as torchtitan's layer does."""

    def exchange_counts(self, counts):
        self.received = super().exchange_counts(counts)
        return self.received


def test_a_count_exchange_that_is_read_elsewhere_is_still_paid_for(fake_ranks):
    for style, num_kept in ((GroupedExperts, 0), (Counts, 1)):
        _, gathered = both_works(style, fake_ranks)
        kept = [w for w in gathered.forward if w.exchange and not w.is_gather]
        assert len(kept) == num_kept


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
    work, rounding = gatherable
    if not is_known:
        rounding = dataclasses.replace(rounding, num_addends=None)
    config = MegaMoEConfig(equal_tokens=True, **options)
    rule = experts_rule(config, work, rounding)
    ways = list_candidates(work, ("experts", "tokens"), wires_tried(config))
    allowed = [c for c in ways if rule(c)]
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
    sent = sum(w.link_bytes for phase in gathered.phases for w in phase)
    fast = RATES.scaled("gather_share", 2.0)
    assert price_us(whole, GATHERED, RATES) == pytest.approx(sent, rel=0.01)
    assert price_us(whole, GATHERED, fast) == pytest.approx(sent / 2, rel=0.01)
    assert price_us(whole, Candidate(), fast) == price_us(whole, Candidate(), RATES)
