"""The kind of docs/add-a-style.md: one word in the tuple, and every pass and report has it."""

import re
from pathlib import Path

import pytest
import torch

from moe_compile.graph.query import is_all_to_all
from moe_compile.report import compilations
from moe_compile.report.compilations import describe
from moe_compile.report.region_reports import CHUNKED
from passes import detect_regions, plan_regions, rewrite_regions
from passes.kinds import KINDS
from passes.pipeline import DYNAMO, run_level
from tests.attention_layers import swap
from tests.capture import dynamo_graphs, state

READERS = (detect_regions, plan_regions, rewrite_regions, compilations)


PAGE = (Path(__file__).parents[2] / "docs" / "add-a-style.md").read_text()
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NAMES = {}
exec(EXAMPLE, NAMES)


@pytest.fixture
def compiled(fake_ranks, monkeypatch):
    """Return what becomes of a round trip: its graph, the state and the report."""
    for module in READERS:
        monkeypatch.setattr(module, "KINDS", (*KINDS, NAMES["ByColumns"]()))

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
    (found,) = ours.found.by_kind["round trips"]
    assert found.region in ours.found.regions
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
