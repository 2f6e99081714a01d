"""A program in which nothing is rewritten says so, with the first reason: never in silence."""

import logging
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single

from moe_compile import backend, nothing_rewritten
from moe_compile.nothing_rewritten import Watch
from moe_compile.report.explanation_text import why_nothing_was_rewritten
from moe_compile.report.process_report import ProcessReport

FX = {"megamoe.codegen": "fx"}


@pytest.fixture
def said(monkeypatch, caplog):
    """Return what is said so far, in a process that compiled nothing yet."""
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    report = ProcessReport()
    monkeypatch.setattr(backend, "REPORT", report)
    monkeypatch.setattr(backend, "WATCH", watch := Watch(report))
    caplog.set_level(logging.WARNING, logger=nothing_rewritten.__name__)

    def texts(*, at_exit=False):
        if at_exit:
            watch.at_exit()
        return [r.message for r in caplog.records if r.name == nothing_rewritten.__name__]

    return texts


def compiled(program):
    return torch.compile(program, backend=backend.megamoe, options=FX)


def dense(x):
    return torch.relu(x) * 2


def test_a_program_without_exchanges_says_so_after_its_second_call(said):
    program = compiled(dense)
    program(torch.ones(3))
    assert said() == []
    program(torch.ones(5))  # compiled anew: the same function
    (text,) = said()
    assert "nothing was rewritten" in text and "no all-to-all is in any graph" in text
    program(torch.ones(7))
    assert len(said(at_exit=True)) == 1


def test_a_program_that_is_called_once_says_so_at_the_end(said):
    compiled(dense)(torch.ones(3))
    assert said() == []
    assert len(said(at_exit=True)) == 1


def broken(x):
    x = torch.relu(x)
    print("between")  # noqa: T201  (it breaks the graph)
    return all_to_all_single(x, None, None, dist.group.WORLD) * 2


def test_all_graphs_of_a_function_are_waited_for(fake_ranks, said):
    """The first of two graphs has no exchange; the reason is that of the second."""
    program = compiled(broken)
    program(torch.ones(4))
    program(torch.ones(4))
    (text,) = said()
    assert "the exchange at test_nothing_rewritten.py:" in text


def in_a_loop(x):
    for _ in range(2):
        x = all_to_all_single(dense(x), None, None, dist.group.WORLD)
        print("inside")  # noqa: T201  (Dynamo ends no graph in a loop)
    return x


def test_a_function_with_an_exchange_that_dynamo_skipped_is_named(fake_ranks, said):
    program = compiled(in_a_loop)
    program(torch.ones(4))
    program(torch.ones(4))
    (text,) = said()
    assert "in in_a_loop" in text and "leaves the function to Python because of line" in text
    assert "ignore_logging_functions" in text


REWRITTEN = {"regions": [{"verdict": "chunked"}], "attention": [], "graphs": []}
REGION = {"where": "a.py:3", "verdict": "a sort that is not stable", "to_do": ["Sort stably."]}


def test_the_first_reason_is_that_of_the_first_region():
    assert why_nothing_was_rewritten(REWRITTEN) == ""
    refused = {**REWRITTEN, "regions": [REGION, {**REGION, "where": "b.py:4"}]}
    assert why_nothing_was_rewritten(refused) == (
        "the experts of the exchange at a.py:3: a sort that is not stable. Sort stably."
    )
    wire = {**REWRITTEN, "regions": [], "graphs": [{"gradient_bytes": 3.0}]}
    assert why_nothing_was_rewritten(wire) == ""


SKIPPED_WHOLE = """
import torch, moe_compile.backend

def program(x):
    for _ in range(2):
        print("inside")
    return x

torch.compile(program, backend="megamoe")(torch.ones(3))
"""


@pytest.mark.slow
def test_a_process_in_which_nothing_was_compiled_says_so_when_it_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SKIPPED_WHOLE)
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0
    assert (
        "nothing was rewritten in this process so far: Dynamo gave megamoe no graph" in run.stderr
    )
