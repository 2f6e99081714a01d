"""`dispatch = "auto"` where sizes are static: the planner decides, once, and the switch obeys."""

import dataclasses

import torch

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.query import is_all_to_all, is_reduce_scatter
from moe_compile.hardware import HardwareProfile
from moe_compile.journal.entries import Dropped, PassReport
from moe_compile.journal.reasons import Reason
from moe_compile.plan.choose_plan import Why
from moe_compile.plan.state import CompileState
from moe_compile.report.region_reports import decision_figures, decision_remarks
from passes.kinds.by_counts.kind import dispatch_remarks
from passes.pipeline import DYNAMO, run_level
from passes.rewrite_regions import RewriteRegions
from tests.capture import dynamo_graphs
from tests.dispatch_layers import Around
from tests.layers import GroupedExperts

MACHINE = HardwareProfile(
    name="of these tests",
    matmul_tflops=0.1,
    memory_gb_per_s=50.0,
    op_overhead_us=0.1,
    link_gb_per_s=0.01,
    link_latency_us=1.0,
)
"""Its link is slow: bytes sent decide. All-to-all sends k / 2 rows per token, gathering 1."""
BUSY = dataclasses.replace(MACHINE, matmul_tflops=0.005)
"""Its experts compute about as long as their rows travel."""


def run(group, top_k=4, style=GroupedExperts, hardware=MACHINE, level=DYNAMO, **options):
    """Return the state after our passes and their results, by name."""
    x = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(style(32, 32, 8, top_k, group), x)
    asked = {
        "dispatch": "auto",
        "numerics": "bounded",
        "equal_tokens": True,
        "max_memory_increase": 10.0,
        **options,
    }
    ours = CompileState(config=MegaMoEConfig(**asked), hardware=hardware)
    results = {r.pass_name: r for r in run_level(level, gm.graph, ours)}
    assert isinstance(results["detect_regions"], PassReport)
    ours.withdraw({name for name, r in results.items() if isinstance(r, Dropped)})
    return gm.graph, ours.experts[0], results


def test_a_slow_link_gathers_where_that_sends_less_and_the_report_has_the_bound(fake_ranks):
    """k = 4 on 2 ranks: half the bytes; sums of four rows round otherwise, by a known bound."""
    graph, plan, _ = run(fake_ranks)
    assert plan.plan.gathers
    assert not any(map(is_all_to_all, graph.nodes))
    assert plan.decision.gathers and plan.decision.why is Why.FASTEST
    assert plan.decision.runner_up.candidate.dispatch == "all_to_all"
    said = "; ".join([*decision_remarks(plan.decision), *dispatch_remarks(plan, "auto")])
    assert "planned: tokens all-gathered, predicted" in said and "; the next best is " in said
    sums = (
        "sums of 4 rows per token are added in another order than in the model, so they differ by"
    )
    assert f"{sums} at most 3 eps" in said
    assert decision_figures(plan.decision)["chosen"] == "tokens all-gathered"


def test_auto_chooses_no_sums_that_round_otherwise_unless_numerics_allows_it(
    fake_ranks,
):
    graph, plan, _ = run(fake_ranks, numerics="exact")
    assert any(map(is_all_to_all, graph.nodes))
    left = plan.left["dispatch"]
    assert left.reason is Reason.ROUNDS and not plan.decision.gathers
    assert (
        left.detail
        == "the difference has a known bound, and megamoe.numerics = 'bounded' allows it"
    )
    assert any("gathered" in str(way.candidate) for way in plan.decision.advice)
    _, named, _ = run(fake_ranks, numerics="exact", dispatch="all_gather")
    assert named.plan.gathers and not named.rounding.is_bitwise


def test_rows_are_exchanged_where_that_sends_less_and_the_report_says_so(fake_ranks):
    graph, plan, _ = run(fake_ranks, top_k=1)
    assert any(map(is_all_to_all, graph.nodes))
    assert plan.left["dispatch"].reason is Reason.BY_PRICE
    assert plan.decision.chosen.candidate.dispatch == "all_to_all"
    assert plan.plan.num_chunks == plan.decision.chosen.candidate.num_chunks
    assert any(Reason.BY_PRICE.value in remark for remark in dispatch_remarks(plan, "auto"))
    other = plan.decision.other_dispatch
    assert other.us > plan.decision.chosen.us
    assert any("tokens all-gathered, +" in s for s in decision_remarks(plan.decision))
    assert decision_figures(plan.decision)["other_dispatch_us"] == other.us


def test_where_the_rule_of_bytes_gathers_a_price_may_not(fake_ranks):
    """k = 2 on 2 ranks is above 0.75 n, and no bit would change; chunks hide the link better."""
    _, plan, _ = run(fake_ranks, top_k=2, hardware=BUSY)
    assert plan.costs.by_measurement
    assert not plan.decision.gathers and plan.plan.num_chunks > 1


def test_with_all_to_all_a_faster_way_that_gathers_is_advice(fake_ranks):
    graph, plan, _ = run(fake_ranks, dispatch="all_to_all", dispatch_wire="auto")
    assert plan.left["dispatch"].reason is Reason.NOT_ASKED
    assert any(map(is_all_to_all, graph.nodes))
    said = [
        s
        for s in decision_remarks(plan.decision)
        if s.endswith("less predicted time") and "gathered" in s
    ]
    assert said[0].startswith("faster, but not chosen because it changes bits: tokens all-gathered")


def test_slices_are_chosen_together_with_the_dispatch(fake_ranks):
    graph, plan, _ = run(fake_ranks, chunk_by="tokens", hardware=BUSY)
    chosen = plan.decision.chosen.candidate
    assert (chosen.dispatch, chosen.chunk_by) == ("all_gather", "tokens")
    assert chosen.num_chunks > 1
    assert plan.plan.num_chunks == chosen.num_chunks == sum(map(is_reduce_scatter, graph.nodes))


def test_memory_that_is_not_there_is_not_taken(fake_ranks):
    _, plan, _ = run(fake_ranks, chunks=1, max_memory_increase=0.0)
    assert plan.decision.why is Why.MEMORY
    assert plan.left["dispatch"].reason is Reason.BY_PRICE


class TwiceTheFirst(Around):
    """A token may have two rows for an expert: how many rows it has is not read off."""

    def gather(self, x, order, scores):
        self.index = torch.cat([order // self.top_k])
        return x[self.index]

    def total(self, x, order, out, scores):
        weights = scores.reshape(-1)[order][:, None].to(out.dtype)
        return torch.zeros_like(x).index_add(0, self.index, out * weights)


def test_without_a_known_bound_auto_keeps_the_all_to_all(fake_ranks):
    _, plan, _ = run(fake_ranks, style=TwiceTheFirst)
    left = plan.left["dispatch"]
    assert left.reason is Reason.ROUNDS
    allowed = "the difference has no known bound, and megamoe.numerics = 'lossy' allows it; it is"
    assert left.detail.startswith(allowed)
    assert not plan.decision.gathers
    _, asked, _ = run(fake_ranks, style=TwiceTheFirst, dispatch="all_gather")
    assert asked.plan.gathers and asked.rounding.bound_eps is None


def test_rows_asked_to_be_quantised_are_exchanged(fake_ranks):
    _, plan, _ = run(fake_ranks, dispatch_wire="fp8", strict=True)
    left = plan.left["dispatch"]
    assert left.reason is Reason.NOT_ASKED and left.detail.startswith(
        "a wire option asks for rows in eight bits"
    )
    assert not plan.decision.gathers


@dataclasses.dataclass(frozen=True)
class FailsToRewrite(RewriteRegions):
    """Rewriting, failing after its edits: the state it is given holds no groups."""

    def run(self, graph, state):
        groups, state.gathered_groups = state.gathered_groups, None
        try:
            return super().run(graph, state)
        finally:
            state.gathered_groups = groups


def test_rewriting_that_fails_leaves_the_region_as_written(fake_ranks):
    passes = tuple(FailsToRewrite() if p.name == "rewrite_regions" else p for p in DYNAMO.passes)
    level = dataclasses.replace(DYNAMO, passes=passes)
    graph, plan, results = run(fake_ranks, level=level)
    assert isinstance(results["rewrite_regions"], Dropped)
    assert any(map(is_all_to_all, graph.nodes))
    assert not plan.plan.gathers and plan.left["chunks"].reason is Reason.FAILED
