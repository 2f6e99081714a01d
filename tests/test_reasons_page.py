"""`docs/reasons.md` has every reason, says what reports say, and its programs give the reasons."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from moe_compile.journal.reasons import Reason
from moe_compile.journal.remedies import REMEDIES
from moe_compile.ops.quantized_rows import REFERENCES
from passes import lower_row_ops
from passes.contract import Fact
from passes.lower_row_ops import LowerRowOps
from passes.pin_order import PinOrder
from passes.record_order import RecordOrder
from tests.capture import state
from tests.reason_programs import PAGE, SECTIONS, verdicts

SHOWN = {name: section for name, section in SECTIONS.items() if section.program}
TOLD = {name: section for name, section in SECTIONS.items() if not section.program}
"""Those that need what is not here, a GPU or another torch or package."""


def cases():
    for name, section in SHOWN.items():
        is_slow = section.is_traced or '"auto"' in section.program
        yield pytest.param(name, marks=[pytest.mark.slow] if is_slow else [])


def test_every_reason_has_a_section():
    missing = {reason.name for reason in Reason if reason.name not in SECTIONS}
    assert not missing, f"write a section of {PAGE.name} for {sorted(missing)}"
    assert [name for name in SECTIONS if name not in Reason.__members__] == []


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_has_the_texts_of_the_reports(name):
    section, reason = SECTIONS[name], Reason[name]
    assert section.text.startswith(f"*{reason.value}* `{reason.kind.name}`, by ")
    assert section.text.endswith(f"To do: {REMEDIES[reason]}.")


@pytest.mark.parametrize("name", cases())
def test_the_program_of_a_section_gives_its_reason_and_no_other(fake_ranks, name):
    """Others of its kind: what stands beside the candidate may be what is not meant, or done."""
    found = list(verdicts(name))
    reasons = {verdict.reason for verdict in found}
    names = {v.detail for v in found if v.detail.isidentifier()} - set(Fact.__members__)
    assert not names, "a node, not an operator"
    assert {reason for reason in reasons if reason.kind is Reason[name].kind} == {Reason[name]}


@pytest.mark.parametrize("name", TOLD)
def test_a_section_without_a_program_names_the_test_that_has_its_reason(name):
    (test,) = re.findall(r"`tests/([\w/]+\.py)`", TOLD[name].text)
    assert f"Reason.{name}" in (PAGE.parents[1] / "tests" / test).read_text()


def test_the_details_of_a_section_are_what_is_said():
    said = re.compile("|".join(texts_of_the_product()))
    details = {detail for section in SECTIONS.values() for detail in section.details}
    assert len(details) > 30
    assert {detail for detail in details if not said.fullmatch(detail)} == set()


def texts_of_the_product():
    """Yield a pattern for each string of the files that give reasons."""
    for folder in ("moe_compile", "passes"):
        for path in Path(PAGE.parents[1], folder).rglob("*.py"):
            source = path.read_text()
            if "Reason." in source:
                yield from filter(None, map(pattern_of, ast.walk(ast.parse(source))))


def pattern_of(node):
    """Return a pattern of a text with several words; values in it may be anything."""
    parts = getattr(node, "values", [node] if isinstance(node, ast.Constant) else [])
    texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
    fixed = "".join(text for text in texts if isinstance(text, str))
    return fixed.count(" ") > 1 and "".join(
        re.escape(text) if isinstance(text, str) else r"\S+( \S+){0,3}" for text in texts
    )


def test_an_order_is_not_held_where_torch_lacks_the_means(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.fx_passes.control_dependencies", None)
    (verdict,) = PinOrder().run(fx.Graph(), state()).skipped
    assert verdict.reason is Reason.NO_MEANS


def test_an_operator_with_a_kernel_is_not_written_out(monkeypatch):
    monkeypatch.setattr(lower_row_ops, "has_kernel", lambda device: True)
    graph = fx.Graph()
    node = graph.call_function(next(iter(REFERENCES)))
    node.meta["val"] = torch.empty(1)
    (verdict,) = LowerRowOps().run(graph, state()).skipped
    assert verdict.why == f"{Reason.ALREADY_DONE.value} (a kernel of megamoe runs it already)"
    (verdict,) = LowerRowOps().run(graph, state(codegen="fx")).skipped
    said = (
        f"{Reason.NOT_ASKED.value} (megamoe.codegen = 'fx' runs operators one by one, "
        "so there is no kernel to fuse into)"
    )
    assert verdict.why == said


def test_a_graph_without_collectives_has_no_order_to_record():
    (verdict,) = RecordOrder().run(fx.Graph(), state()).skipped
    assert verdict.why == f"{Reason.ALREADY_DONE.value} (the graph launches no collective)"
