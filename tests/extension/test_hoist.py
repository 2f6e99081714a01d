"""The example hoists an all-reduce as early as is legal, and no earlier."""

import torch
from torch.distributed._functional_collectives import all_reduce

from moe_compile.graph.query import is_launch
from moe_compile.journal.reasons import Reason
from passes.pipeline import DYNAMO, Level, run_level
from tests.capture import dynamo_graphs, state
from tests.extension.hoist_all_reduce.hoist_all_reduce import HoistAllReduce


def hoisted(program):
    """Return the order of launch, products and writes after the rewrite, and its report."""
    (gm,) = dynamo_graphs(program, torch.randn(4, 4))
    _, report = run_level(Level((DYNAMO.passes[0], HoistAllReduce())), gm.graph, state())
    names = {torch.tanh: "tanh", "add_": "write"}
    order = ["launch" if is_launch(n) else names.get(n.target, "") for n in gm.graph.nodes]
    return [name for name in order if name], report


def test_it_stays_behind_a_write_to_what_it_sends(fake_ranks):
    def program(x):
        load = x.mean(0)
        first = torch.tanh(x)
        load.add_(1)
        second = torch.tanh(first)
        return second + all_reduce(load, "sum", fake_ranks)

    order, report = hoisted(program)
    assert order == ["tanh", "write", "launch", "tanh"] and len(report.applied) == 1


def test_it_passes_a_write_to_something_else(fake_ranks):
    def program(x):
        load = x.mean(0)
        first = torch.tanh(x)
        first.add_(1)
        return torch.tanh(first) + all_reduce(load, "sum", fake_ranks)

    order, _ = hoisted(program)
    assert order == ["launch", "tanh", "write", "tanh"]


def test_one_that_is_as_early_as_can_be_is_left(fake_ranks):
    order, report = hoisted(lambda x: all_reduce(x.mean(0), "sum", fake_ranks) + torch.tanh(x))
    assert order == ["launch", "tanh"]
    assert [v.reason for v in report.skipped] == [Reason.ALREADY_DONE] and not report.applied
