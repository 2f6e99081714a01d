"""What users are told to change about a reason comes from one table, wherever they read it."""

import pytest
import torch

from moe_compile.backend import rewrite
from moe_compile.errors import RegionRefused
from moe_compile.journal.reasons import Kind, Reason
from moe_compile.journal.remedies import NOTHING, REMEDIES, to_do
from moe_compile.report.explain import print_report
from moe_compile.report.process_report import ProcessReport
from tests.capture import dynamo_graphs, state
from tests.layers import Centred, GroupedExperts


def test_every_reason_has_an_entry():
    assert [reason.name for reason in Reason if reason not in REMEDIES] == []


def test_what_is_meant_or_asked_for_has_something_to_change():
    acted_on = (r for r in Reason if r.kind in (Kind.UNPROVEN, Kind.NOT_POSSIBLE))
    assert [r.name for r in acted_on if REMEDIES[r].startswith(NOTHING)] == []


def test_report_and_error_say_reason_detail_and_what_to_change(fake_ranks, capsys):
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(Centred(16, 24, 8, 2, fake_ranks), x)
    _, compilation = rewrite(gm, state(chunks=2).config)
    report = ProcessReport()
    report.add(compilation, "", "cpu")
    change = to_do(Reason.ROWS_MIXED)
    assert change.endswith("(docs/reasons.md#rows_mixed)")
    (region,) = report.as_dict()["regions"]
    assert region["verdict"].startswith(Reason.ROWS_MIXED.value + " (`.mean()`: ")
    assert region["to_do"] == (change,)
    said = [one for record in report.as_dict()["passes"] for one in record.get("skipped", ())]
    assert REMEDIES[Reason.ROWS_MIXED] in {one["to_do"] for one in said}
    print_report(report.as_dict())
    printed = " ".join(capsys.readouterr().out.split())
    assert "docs/reasons.md#rows_mixed" in printed
    (gm,) = dynamo_graphs(Centred(16, 24, 8, 2, fake_ranks), x)
    with pytest.raises(RegionRefused) as raised:
        rewrite(gm, state(chunks=2, strict=True).config)
    assert "`.mean()`: " in str(raised.value) and change in str(raised.value)


def test_what_was_not_asked_for_is_told_without_advice(fake_ranks):
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(GroupedExperts(16, 24, 8, 2, fake_ranks), x)
    _, compilation = rewrite(gm, state(chunks=1).config)
    assert [region.to_do for region in compilation.regions] == [()]
