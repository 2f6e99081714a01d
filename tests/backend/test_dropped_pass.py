"""A pass that fails is left out, with one warning, and the graph is as if it were absent."""

import logging
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.journal.entries import Dropped, PassReport
from moe_compile.journal.reasons import Reason
from moe_compile.report.process_report import REPORT
from moe_compile.testing.programs.judge import Outcome, judgement_of
from moe_compile.testing.programs.run import run
from passes.compress_gradients import CompressGradients
from passes.contract import Fact, GraphPass
from passes.kinds import by_heads
from passes.pipeline import Level, run_level
from tests.capture import state


@dataclass(frozen=True)
class FailsHalfway(GraphPass):
    name: ClassVar[str] = "fails_halfway"
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_FOUND})

    def run(self, graph, state):
        node = next(n for n in graph.nodes if n.op == "call_function")
        node.target = torch.ops.aten.mul.Tensor
        raise RuntimeError("half of the edit is done")


@dataclass(frozen=True)
class NeedsRegions(GraphPass):
    name: ClassVar[str] = "needs_regions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_FOUND})

    def run(self, graph, state):
        return PassReport(pass_name=self.name, applied=("something",))


LEVEL = Level((FailsHalfway(), NeedsRegions()))


def program(x):
    return x + x


def test_the_graph_is_restored_and_what_needs_the_pass_is_left_out(caplog):
    gm = make_fx(program)(torch.ones(3))
    before = str(gm.graph)
    with caplog.at_level(logging.WARNING, logger="moe_compile"):
        results = run_level(LEVEL, gm.graph, state())
    gm.recompile()
    assert str(gm.graph) == before
    assert torch.equal(gm(torch.ones(3)), torch.full((3,), 2.0))
    assert results == [
        Dropped("fails_halfway", Reason.FAILED, "RuntimeError: half of the edit is done"),
        Dropped("needs_regions", Reason.NEEDS_FACT, "REGIONS_FOUND"),
    ]
    assert [r.message for r in caplog.records] == [
        "megamoe: pass fails_halfway failed and is left out for this graph: "
        "RuntimeError: half of the edit is done"
    ]


def test_strict_raises_instead():
    gm = make_fx(program)(torch.ones(3))
    with pytest.raises(RuntimeError, match="half of the edit"):
        run_level(LEVEL, gm.graph, state(strict=True))


@dataclass(frozen=True)
class FindsTheGraphWrong(FailsHalfway):
    name: ClassVar[str] = "finds_the_graph_wrong"
    is_check: ClassVar[bool] = True


def test_what_a_check_finds_is_never_passed_over():
    gm = make_fx(program)(torch.ones(3))
    with pytest.raises(RuntimeError, match="half of the edit"):
        run_level(Level((FindsTheGraphWrong(),)), gm.graph, state())


def test_a_disabled_pass_is_left_out():
    gm = make_fx(program)(torch.ones(3))
    level = Level((NeedsRegions(),), frozenset({Fact.REGIONS_FOUND}))
    (result,) = run_level(level, gm.graph, state(disable_passes=("needs_regions",)))
    assert result == Dropped("needs_regions", Reason.DISABLED)


def test_the_graph_is_printed_before_a_level_and_after_each_pass_that_changed_it(caplog):
    gm = make_fx(program)(torch.ones(3))
    level = Level((NeedsRegions(), FailsHalfway()), frozenset({Fact.REGIONS_FOUND}))
    with caplog.at_level(logging.DEBUG, logger="moe_compile"):
        run_level(level, gm.graph, state())
    said = [r.getMessage() for r in caplog.records if r.name == "moe_compile.passes"]
    printed = [text for text in said if text.startswith("megamoe_dynamo")]
    names = ("megamoe_dynamo_before_needs_regions", "megamoe_dynamo_after_needs_regions")
    assert printed == [f"{name}:\n{gm.graph}" for name in names]


TEXT = """
import torch
MIRRORED, RAISES, BOUND, DYNAMIC, SEED, OPTIONS = False, False, 0.0, None, 0, {}
TOKENS, WIDTH, DTYPE, BACKWARD = [(2, 2)], 3, torch.float32, "once"
class Program(torch.nn.Module):
    def forward(self, x):
        return x * 2, []
"""


def test_a_disabled_pass_alone_is_no_reason_to_report_a_compilation():
    text = TEXT.replace("{}", "{'megamoe.disable_passes': ('quantize_exchanges',)}")
    assert run(0, text).dropped == []


def failing(graph):
    raise IndexError("tuple index out of range")


def test_a_compilation_that_lost_a_pass_is_reported_though_it_has_nothing_else(monkeypatch):
    """It has neither regions nor attention where what finds them failed."""
    monkeypatch.setattr(by_heads, "find_attention", failing)
    found = run(0, TEXT)
    dropped = "detect_regions: IndexError: tuple index out of range"
    assert judgement_of([found]).kind is Outcome.DROPPED
    assert dropped in found.dropped
    assert dropped in REPORT.as_dict()["dropped_passes"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_pass_that_fails_on_a_later_graph_is_reported_as_one_on_the_first(monkeypatch, direction):
    """The ranks' comparison alone was told of it, neither the report nor the fuzzer."""

    def fails(self, graph, state):
        if state.is_backward is (direction == "backward"):
            raise IndexError("tuple index out of range")
        return PassReport(pass_name=self.name)

    monkeypatch.setattr(CompressGradients, "run", fails)
    text = TEXT.replace("{}", "{'megamoe.gradient_wire': 'bf16_fp32_sum'}")
    found = run(0, text)
    dropped = f"compress_gradients {direction}: IndexError: tuple index out of range"
    assert judgement_of([found]).kind is Outcome.DROPPED
    assert found.dropped == [dropped]
    assert dropped in REPORT.as_dict()["dropped_passes"]
