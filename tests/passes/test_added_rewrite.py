"""What another distribution adds runs with every compilation, and is reported."""

import io

import pytest
import torch
from rich.console import Console

from moe_compile.backend import _as_written, rewrite
from moe_compile.config import MegaMoEConfig
from moe_compile.errors import InvalidConfig
from moe_compile.journal.reasons import Reason
from moe_compile.report.explain import print_report
from moe_compile.report.process_report import ProcessReport
from passes.pipeline import DYNAMO, check_names, dynamo_level
from tests.added import add_distribution, forget
from tests.capture import dynamo_graphs
from tests.passes.test_rewrite import Sine

ENTRIES = """
[megamoe.rewrites]
to_cosine = tests.passes.test_rewrite:ToCosine
bounded = tests.passes.test_rewrite:Bounded
"""


@pytest.fixture(autouse=True)
def added(tmp_path, monkeypatch):
    add_distribution(tmp_path, monkeypatch, ENTRIES)
    yield
    forget()


def test_they_run_last_and_by_name():
    passes = dynamo_level().passes
    assert passes[: len(DYNAMO.passes)] == DYNAMO.passes
    assert [p.name for p in passes[len(DYNAMO.passes) :]] == ["bounded", "to_cosine"]


def test_they_are_disabled_by_name():
    check_names(["to_cosine"])
    with pytest.raises(InvalidConfig, match="Did you mean 'to_cosine'"):
        check_names(["to_cosines"])


@pytest.mark.parametrize("disabled", [False, True])
def test_a_compiled_program_is_rewritten(disabled):
    torch._dynamo.reset()
    x = torch.rand(3)
    names = ["to_cosine"] if disabled else []
    options = {"megamoe.codegen": "fx", "megamoe.disable_passes": names}
    compiled = torch.compile(Sine(), backend="megamoe", options=options)
    expected = torch.sin(x) if disabled else torch.cos(x)
    assert torch.equal(compiled(x), expected + 1)


def test_the_report_says_what_was_done_and_left_for_a_person_too():
    (gm,) = dynamo_graphs(Sine(), torch.ones(3))
    _, compilation = rewrite(gm, MegaMoEConfig(hardware="cpu", equal_tokens=True))
    report = ProcessReport()
    report.add(compilation, "", "cpu")
    kept = "left alone all else: no reason in megamoe's list fits (it is no sine)"
    left, also, done, others = report.as_dict()["rewrites"]
    assert left.startswith(f"bounded: {kept}") and others.startswith(f"to_cosine: {kept}")
    rounded = f"bounded: left alone sin: {Reason.ROUNDS.value} (the difference"
    assert also.startswith(rounded)
    assert done.startswith("to_cosine: applied to sin; predicted 0.0")
    text = io.StringIO()
    print_report(report.as_dict(), Console(file=text, width=200))
    said = " ".join(text.getvalue().split())
    assert f"Rewrite {done}" in said and "megamoe changed nothing" not in said


def test_ranks_that_do_not_agree_run_without_them():
    config = _as_written(MegaMoEConfig())
    assert {p.name for p in dynamo_level().passes} <= set(config.disable_passes)


def test_a_compilation_ends_with_what_is_wrong_with_a_transport():
    torch._dynamo.reset()
    compiled = torch.compile(Sine(), backend="megamoe", options={"megamoe.transport": "function"})
    with pytest.raises(InvalidConfig, match="Did you mean 'functional'"):
        compiled(torch.rand(3))


def test_a_compilation_ends_with_what_is_wrong_with_an_entry_point(tmp_path, monkeypatch):
    folder = tmp_path / "broken"
    folder.mkdir()
    add_distribution(folder, monkeypatch, ENTRIES.replace(":ToCosine", ":ToCosines"))
    torch._dynamo.reset()
    compiled = torch.compile(Sine(), backend="megamoe")
    with pytest.raises(InvalidConfig, match=r"from distribution added 1\.0, cannot be imp"):
        compiled(torch.rand(3))
