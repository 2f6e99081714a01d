"""What the passes of every level reported is kept, and read back from the report."""

import collections
import itertools

import pytest
import torch

from moe_compile.backend import raise_if_strict, rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import OFF, MegaMoEConfig
from moe_compile.errors import RegionRefused
from moe_compile.journal.entries import Journal, PassReport, Verdict
from moe_compile.journal.reasons import Kind, Reason
from moe_compile.report.process_report import ProcessReport
from passes.pipeline import DYNAMO, JOINT, POST_GRAD, POST_GRAD_EARLY, RECORD
from passes.save_exchanges import NOT_CHECKPOINTED
from tests.capture import dynamo_graphs
from tests.layers import GroupedExperts


def traced(group, **options):
    """Return the journal of one layer whose forward and backward graphs were made, and as data."""
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(GroupedExperts(16, 24, 8, 2, group), x)
    state, compilation = rewrite(gm, MegaMoEConfig(hardware="cpu", **options))
    report = ProcessReport()
    report.add(compilation, "", "cpu")
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    trace_both(gm, inputs, state)
    return compilation.journal, report.as_dict()["passes"]


def test_every_pass_of_every_level_reports_on_every_graph(fake_ranks):
    journal, _ = traced(fake_ranks, chunks=2)
    each = (POST_GRAD_EARLY, POST_GRAD, RECORD)
    levels = {"dynamo": (DYNAMO,), "joint": (JOINT,), "forward": each, "backward": each}
    assert collections.Counter((graph, result.pass_name) for graph, result in journal.records) == {
        (graph, p.name): 1 for graph, some in levels.items() for level in some for p in level.passes
    }


def test_a_verdict_after_the_dynamo_level_has_its_reason(fake_ranks):
    said = {(s["graph"], s["pass"]): s for s in traced(fake_ranks, chunks=2)[1]}
    left = said["joint", "save_exchanges"]["skipped"]
    assert {one["reason"] for one in left} == {Reason.ALREADY_DONE.value}
    assert {one["detail"] for one in left} == {NOT_CHECKPOINTED}
    assert said["backward", "schedule_exchanges"]["measures"]["num_launches"] > 0


def test_a_pass_left_out_is_said_with_the_reason(fake_ranks):
    _, data = traced(fake_ranks, disable_passes=("rewrite_regions",))
    said = {s["pass"]: s for s in data}
    assert said["rewrite_regions"]["dropped"] == Reason.DISABLED.value
    assert said["quantize_exchanges"]["dropped"] == Reason.NEEDS_FACT.value
    assert said["quantize_exchanges"]["detail"] == "REWRITTEN"


@pytest.mark.parametrize(
    ("option", "reason"), [*zip(itertools.cycle(OFF), Reason, strict=False)], ids=str
)
def test_strict_raises_for_what_is_asked_for_meant_and_unproven(option, reason):
    journal = Journal()
    verdict = Verdict(candidate="region 0", reason=reason, option=option, where="model.py:3 in f")
    journal.add("dynamo", PassReport(pass_name="p", skipped=(verdict,)))
    raise_if_strict(journal, "elsewhere")  # it was not asked for by name
    asked = Verdict(candidate="region 0", reason=reason, option=option, is_asked=True)
    journal.add("dynamo", PassReport(pass_name="p", skipped=(asked,)))
    if reason.kind is not Kind.UNPROVEN:
        raise_if_strict(journal, "elsewhere")
        return
    with pytest.raises(RegionRefused) as raised:
        raise_if_strict(journal, "elsewhere")
    said = str(raised.value)
    assert said.startswith(f"elsewhere: megamoe.{option} ") and reason.value in said
    assert f"megamoe.{option} = {OFF[option][0]!r}" in said


def test_reasons_have_texts_of_their_own():
    """A member with the text of another would be that other one."""
    assert len({reason.value for reason in Reason}) == len(Reason.__members__)
