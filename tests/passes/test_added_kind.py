"""A kind of region that a test adds: one word in the tuple, and every pass and report has it."""

import operator
from dataclasses import dataclass

import pytest
import torch

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import group_name, is_all_to_all, is_wait, source_place
from moe_compile.plan.plan import RegionPlan
from moe_compile.plan.planned import Found, Planned
from moe_compile.report import compilations
from moe_compile.report.compilations import describe
from moe_compile.report.region_reports import CHUNKED, RegionReport
from passes import detect_regions, plan_regions, rewrite_regions
from passes.kinds import KINDS
from passes.kinds.contract import Emitted, Finds, RegionKind
from passes.pipeline import DYNAMO, run_level
from tests.attention_layers import swap
from tests.capture import dynamo_graphs, state

READERS = (detect_regions, plan_regions, rewrite_regions, compilations)


@dataclass(frozen=True)
class RoundTrip:
    name: str
    launches: tuple
    body: tuple

    @property
    def result(self):
        return self.body[-1]


class ByColumns(RegionKind):
    """Rows that travel there and back, with an operator by element between, in column halves."""

    name = "round trips"

    def find(self, facts, config, before):
        there, back = filter(is_all_to_all, facts.graph.nodes)
        last = next(node for node in back.users if is_wait(node))
        body = tuple(node for node in facts.graph.nodes if there <= node <= last)
        found = Found(region=RoundTrip("trip", (there, back), body), where=source_place(there))
        return Finds(found=(found,), exchanges=frozenset({there.name, back.name}))

    def plan(self, state, layers):
        (found,) = state.found.by_kind[self.name]
        assert found.region in state.found.regions and layers.around(found.region)
        plan = RegionPlan(group=group_name(found.region.launches[0]), num_chunks=2)
        return (Planned(found=found, plan=plan, remarks=("in halves",)),)

    def emit(self, one, state):
        region, halves = one.found.region, []
        emit, (sent, *_) = Emitter(region.result), region.body[0].all_input_nodes
        parts = emit.call(torch.chunk, sent, 2, 1)
        for number in range(2):
            env = {sent: emit.call(operator.getitem, parts, number)}
            for node in region.body:
                env[node] = emit.copy(node, env)
            halves.append(env[region.result])
        return Emitted(instead={region.result: emit.call(torch.cat, halves, 1)}, body=region.body)

    def say(self, one, config):
        return RegionReport(
            name=one.found.name,
            where=one.found.where,
            num_ranks=2,
            num_local_experts=1,
            num_chunks=one.plan.num_chunks,
            num_host_reads=0,
            verdict=CHUNKED if one.is_rewritten else one.left["chunks"].why,
            remarks=one.remarks,
        )


@pytest.fixture
def compiled(fake_ranks, monkeypatch):
    """Return what becomes of a round trip: its graph, the state and the report."""
    for module in READERS:
        monkeypatch.setattr(module, "KINDS", (*KINDS, ByColumns()))

    def compile_it(**options):
        (gm,) = dynamo_graphs(
            lambda x: swap(swap(x, fake_ranks).relu(), fake_ranks), torch.ones(4, 8)
        )
        ours = state(**options)
        results = {result.pass_name: result for result in run_level(DYNAMO, gm.graph, ours)}
        ours.withdraw(options.get("disable_passes", ()))
        report = describe(gm, ours)
        report.add_level(ours)
        return gm.graph, ours, results, report

    return compile_it


def test_a_kind_that_is_added_is_found_planned_rewritten_and_reported(compiled):
    graph, ours, results, report = compiled()
    applied = [results[f"{what}_regions"].applied for what in ("detect", "plan", "rewrite")]
    assert applied == [("trip",)] * 3
    assert len(list(filter(is_all_to_all, graph.nodes))) == 4
    assert ours.plan.value({})["round trips"] == [{"group": None, "num_chunks": 2, "unproven": ""}]
    (region,) = report.regions
    assert (region.verdict, region.num_chunks, region.remarks) == (CHUNKED, 2, ("in halves",))


def test_exchanges_that_a_kind_has_are_not_spoken_of_by_those_before_it(compiled):
    _, ours, results, report = compiled()
    assert not ours.found.others and not results["detect_regions"].skipped and not report.unmatched


def test_what_no_pass_carries_out_is_left_as_written(compiled):
    graph, ours, _, report = compiled(disable_passes=("rewrite_regions",))
    assert len(list(filter(is_all_to_all, graph.nodes))) == 2 and not ours.is_chunked
    assert ours.plan.value({})["round trips"][0]["num_chunks"] == 1
    (region,) = report.regions
    assert (region.num_chunks, region.remarks) == (1, ())
