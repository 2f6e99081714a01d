"""`docs/reasons.md` has every reason, says what reports say, and its programs give the reasons."""

import pytest

from moe_compile.journal.reasons import Reason
from moe_compile.journal.remedies import REMEDIES
from tests.reason_programs import SECTIONS, verdicts


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_has_the_texts_of_the_reports(name):
    section, reason = SECTIONS[name], Reason[name]
    assert section.text.startswith(f"*{reason.value}* `{reason.kind.name}`, by ")
    assert section.text.endswith(f"To do: {REMEDIES[reason]}.")


@pytest.mark.parametrize("name", [name for name, found in SECTIONS.items() if found.program])
def test_the_program_of_a_section_gives_its_reason_and_no_other(fake_ranks, name):
    """Others of its kind: what stands beside the candidate may be what is not meant, or done."""
    reasons = {verdict.reason for verdict in verdicts(name)}
    assert {reason for reason in reasons if reason.kind is Reason[name].kind} == {Reason[name]}
