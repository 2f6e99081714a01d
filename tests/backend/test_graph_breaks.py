"""What broke a graph is told: the operator, the user's line, and what to write instead."""

import contextlib
import logging
import warnings
from traceback import FrameSummary

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distributed_nn
from torch._dynamo.exc import UserError
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from moe_compile import backend
from moe_compile.report.graph_breaks import TORCH, break_at, forget_frames, frames_left_out
from moe_compile.report.process_report import ProcessReport
from tests.capture import CapturedError
from tests.layers import LoopExperts
from tests.legacy_layers import Megatron
from tests.slow_parameters import slow_but

FX = {"megamoe.codegen": "fx", "megamoe.chunks": 2}


class AwaitedByHandle(Megatron):
    def exchange(self, rows, got, sent):
        out = rows.new_empty(sum(got), rows.shape[1])
        handle = dist.all_to_all_single(out, rows, got, sent, group=self.group, async_op=True)
        handle.wait()
        return out


class InLists(Megatron):
    def exchange(self, rows, got, sent):
        outs = [rows.new_empty(size, rows.shape[1]) for size in got]
        dist.all_to_all(outs, list(torch.split(rows, sent)), group=self.group)
        return torch.cat(outs)


class PrintsBetween(LoopExperts):
    def experts(self, rows, received):
        print("experts")  # noqa: T201  (it breaks the graph)
        return super().experts(rows, received)


class WarnsBetween(LoopExperts):
    """Megatron-Core 0.16.1's linear layers of one rank warn so, on rank 0 alone."""

    def experts(self, rows, received):
        warnings.warn("a group is None", DeprecationWarning, stacklevel=2)
        return super().experts(rows, received)


class BranchesOnCounts(Megatron):
    def experts(self, rows, received):
        for expert in range(self.local):
            if received[expert].item() > 3:
                rows = rows * 2
        return super().experts(rows, received)


class LabelsOfUnknownLength(Megatron):
    def expert_of_rows(self, rows, received):
        ids = torch.arange(self.local, device=rows.device).repeat(self.num_ranks)
        return torch.repeat_interleave(ids, received)


def warnings_of(program, caplog, *inputs):
    """Return what is warned of while `program` is compiled, up to the end of its first graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    backend._warn_once.cache_clear()

    def compile_and_stop(gm, example_inputs):
        backend.megamoe(gm, example_inputs, options=FX)

        def stop(*inputs):
            raise CapturedError

        return stop

    compiled = torch.compile(program, backend=compile_and_stop)
    with caplog.at_level(logging.WARNING, logger="moe_compile"), contextlib.suppress(CapturedError):
        compiled(*inputs)
    return [r.message for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("style", "why", "remedy"),
    [
        (AwaitedByHandle, "exchange: async_op=True", "leave async_op out"),
        (InLists, "does not trace torch.distributed.all_to_all", "all_to_all_single on the joined"),
        (PrintsBetween, "builtin operator `print`", "ignore_logging_functions.add(print)"),
        (WarnsBetween, "builtin `_warnings.warn`", "ignore_logging_functions.add(print)"),
        (BranchesOnCounts, "`if received[expert].item() > 3:`", "torch.where for a branch"),
        (LabelsOfUnknownLength, "`aten.repeat_interleave.Tensor`", "output_size=n"),
    ],
)
def test_the_line_that_broke_a_layer_is_named_with_what_to_write(
    fake_ranks, caplog, style, why, remedy
):
    """What was told was that no exchange back is in the graph."""
    layer, x = style(16, 24, 8, 2, fake_ranks), torch.randn(24, 16).bfloat16()
    (warning,) = warnings_of(layer, caplog, x)
    assert "The graph ends at " in warning and why in warning and remedy in warning
    assert " at 0x" not in warning
    assert "graph_breaks.py:" in warning


def in_lists(x):
    outs = [torch.empty_like(x) for _ in range(2)]
    dist.all_to_all(outs, [x * 2, x])
    return torch.cat(outs)


def test_a_graph_without_an_exchange_that_ends_at_one_is_warned_of(fake_ranks, caplog):
    (warning,) = warnings_of(in_lists, caplog, torch.randn(4, 4))
    assert "no region is found around" in warning and "in in_lists" in warning


def routed(x):
    return x * 2


def by_distributed_nn(x):
    x = distributed_nn.all_to_all_single(torch.empty_like(x), routed(x))
    return routed(x)


def test_a_function_that_is_left_to_python_is_named(fake_ranks, caplog):
    """Nothing was compiled but the functions that it calls, and nothing said."""
    (warning,) = warnings_of(by_distributed_nn, caplog, torch.randn(4, 4))
    assert "in by_distributed_nn" in warning
    if "the exchange at" not in warning:  # torch 2.11 traces it
        assert "is not supported under torch.compile" in warning
        assert "all_to_all_single_autograd" in warning


def scaled(x, factor):
    return x * factor


def scaled_exchange(x, factor):
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x * factor)
    return y


@pytest.mark.parametrize("program", [scaled, scaled_exchange])
def test_a_function_beyond_the_limit_on_its_compilations_is_named(fake_ranks, caplog, program):
    """Torch records no file of it; the next compilation of any function crashed on that."""
    torch._dynamo.reset()
    backend._warn_once.cache_clear()
    torch._dynamo.utils.clear_compilation_metrics()
    compiled = torch.compile(program, backend="megamoe", options=FX)
    with torch._dynamo.config.patch(recompile_limit=1), caplog.at_level(logging.WARNING):
        for factor in (1.0, 2.0, 3.0):
            compiled(torch.randn(4, 4), factor)
        torch.compile(plain, backend="megamoe", options=FX)(torch.randn(4, 4))
    told = [r.message for r in caplog.records if "recompile limit exceeded" in r.message]
    told = [one for one in told if one.startswith("megamoe: ")]
    if program is scaled:
        assert not told
    else:
        (warning,) = told
        assert "in scaled_exchange" in warning and "mark_dynamic" in warning


def indexed_by_a_value(x):
    return x.split(1)[x.argmax().tolist()]


def test_a_failure_before_a_reset_is_of_no_function_after_it(fake_ranks):
    """torch numbers functions anew, and keeps its records of those before."""
    torch._dynamo.reset()
    forget_frames()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        with pytest.raises((GuardOnDataDependentSymNode, UserError)):
            torch.compile(indexed_by_a_value, backend="eager", fullgraph=True)(torch.ones(2))
        torch._dynamo.reset()
        torch.compile(scaled_exchange, backend="eager")(torch.randn(4, 4), 1.0)
    assert frames_left_out() == []


def printing(x):
    print(x.shape)  # noqa: T201  (it breaks the graph)
    return x * 2


def plain(x):
    y = x * 2
    print("x")  # noqa: T201  (it breaks the graph)
    return y


@pytest.mark.parametrize("program", [plain, printing])
def test_what_breaks_where_no_collective_is_goes_to_the_report_alone(
    fake_ranks, caplog, monkeypatch, program
):
    report = ProcessReport()
    monkeypatch.setattr(backend, "REPORT", report)
    assert warnings_of(program, caplog, torch.randn(4, 4)) == []
    if program is plain:
        (told,) = report.as_dict()["graph_breaks"]
        assert "in plain" in told and "print" in told


@pytest.mark.parametrize(
    ("style", "function"),
    slow_but(
        [(WarnsBetween, warnings.warn)], [(PrintsBetween, print), (WarnsBetween, warnings.warn)]
    ),
)
def test_what_is_left_out_breaks_no_layer(fake_ranks, monkeypatch, caplog, style, function):
    """The remedy that is told of is one."""
    ignored = {*torch._dynamo.config.ignore_logging_functions, function}
    layer, x = style(16, 24, 8, 2, fake_ranks), torch.randn(24, 16).bfloat16()
    with torch._dynamo.config.patch(ignore_logging_functions=ignored):
        assert warnings_of(layer, caplog, x) == []


def test_code_of_torchtitan_is_not_torchs():
    """Its folder begins with the name of torch's, and breaks in it had no place."""
    stack = [FrameSummary(f"{TORCH.rstrip('/')}titan/models/moe/moe.py", 7, "forward")]
    assert break_at(stack, "why").where == "moe.py:7 in forward"
