"""The host takes the integers of one vector by one call, with the values and symbols they had."""

from unittest import mock

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor import lowering
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.graph import GraphLowering

from moe_compile.cost.amounts import is_free
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.precedence import integers_taken, is_host_read
from moe_compile.ops.integers import INTEGERS
from passes import unpack_integers
from passes.merge_host_reads import MergeHostReads
from passes.unpack_integers import UnpackIntegers
from tests.capture import state
from tests.device_programs import exchange, to_list, traced
from tests.scheduled_layers import one_rank_group

SENT, GOT = torch.tensor([2, 1, 1]), torch.tensor([3, 1, 0], dtype=torch.int32)
ROWS = torch.randn(4, 2)


def unpacked(program, *vectors):
    """Return the graph after the pass, and its report; on a CPU its values are the same."""
    gm = traced(program, *vectors)
    expected = gm(*vectors)
    MergeHostReads().run(gm.graph, state())
    sizes = {n.name: str(n.meta["val"]) for n in gm.graph.nodes if integers_taken(n)}
    report = UnpackIntegers().run(gm.graph, state())
    gm.graph.lint()
    gm.recompile()
    assert all(map(torch.equal, gm(*vectors), expected))
    assert {n.name: str(n.meta["val"]) for n in gm.graph.nodes if n.name in sizes} == sizes
    return gm.graph, report


def taken(graph):
    """Return how many integers each node takes that takes any."""
    return [number for node in graph.nodes if (number := integers_taken(node))]


def test_what_one_exchange_needs_is_taken_by_one_call():
    def program(sent, got, rows):
        return (exchange(rows, to_list(got * 1), to_list(sent * 1)),)

    graph, report = unpacked(program, SENT, GOT, ROWS)
    assert taken(graph) == [6]
    assert not report.skipped and sum(int(one.split()[0]) for one in report.applied) == 6


def test_it_is_a_host_read_that_takes_no_time_of_the_device_and_has_no_rows():
    def program(sent, got, rows):
        return (exchange(rows, to_list(got * 1), to_list(sent * 1)),)

    graph, _ = unpacked(program, SENT, GOT, ROWS)
    (call,) = graph.find_nodes(op="call_function", target=INTEGERS)
    assert is_host_read(call) and is_free(call)
    known = {}
    NominalSizes(known, rows=1).learn(graph)
    assert max(known.values()) <= len(ROWS)


def test_some_elements_last_first_and_twice():
    """Torch gives one symbol to what it reads twice of one tensor, and another of another."""

    def program(sent, got, rows):
        host = sent.to("cpu")
        last, first, again = (host.select(0, i) for i in (-1, 0, 0))
        numbers = [element.item() for element in (last, first, first, again)]
        return (exchange(rows, [*numbers[:2], 1], [numbers[0], numbers[2], numbers[3] - 1]),)

    graph, _ = unpacked(program, SENT, GOT, ROWS)
    (call,) = graph.find_nodes(op="call_function", target=INTEGERS)
    assert taken(graph) == [3] and call.args[1] == [2, 0, 0]


def test_what_is_taken_alone_stays_and_is_named():
    def program(sent, got, rows):
        for size in (sent.sum().item(), got.to("cpu").select(0, 0).item()):
            torch._check(size >= 0)
            rows = torch.cat([rows, rows.new_zeros(size, 2)])
        return (rows,)

    graph, report = unpacked(program, SENT, GOT, ROWS)
    assert taken(graph) == [1, 1] and not report.applied
    assert [one.reason.name for one in report.skipped] == ["READ_ALONE"] * 2


def test_only_integers_of_a_vector_on_the_host():
    def program(sent, table, rows):
        numbers = [sent.select(0, i).item() for i in (0, 1)]
        numbers += [table.to("cpu").select(0, i).select(0, i).item() for i in (0, 1)]
        for number in numbers:
            torch._check(number >= 0)
        return (rows.new_zeros(sum(numbers)),)

    gm = traced(program, SENT, torch.ones(2, 2, dtype=torch.int64), ROWS)
    report = UnpackIntegers().run(gm.graph, state())
    assert taken(gm.graph) == [1] * 4 and not report.applied


class Unpacking(CustomGraphPass):
    def __call__(self, graph):
        UnpackIntegers().run(graph, state())

    def uuid(self):
        return None


FORMS = {"tolist": (2, 0, 0), "operator": (0, 2, 0), "item": (0, 0, 6)}
"""What Inductor writes -> lists, calls of the operator, integers one by one."""


@pytest.mark.parametrize("form", FORMS)
def test_inductor_writes_one_call_for_them(form, monkeypatch):
    """The operator where torch lacks the means to write a list; without the pass `.item()`s."""
    if form == "operator":
        monkeypatch.setattr(unpack_integers, "write_as_list", lambda: False)
        monkeypatch.delitem(lowering.lowerings, INTEGERS, raising=False)

    def program(sent, got, rows):
        return exchange(rows, got.tolist(), sent.tolist())

    one_rank_group()
    codes = []
    passes = {} if form == "item" else {"post_grad_custom_post_pass": Unpacking()}
    torch._dynamo.reset()
    with (
        mock.patch.object(GraphLowering, "save_output_code", codes.append),
        inductor_config.patch(force_disable_caches=True, **passes),
        torch._dynamo.config.patch(capture_scalar_outputs=True),
    ):
        made = torch.compile(program, fullgraph=True)(SENT, GOT.long(), ROWS)
    assert torch.equal(made, ROWS)
    (code,) = codes
    written = (".tolist()", "megamoe.integers.default(", ".item()")
    assert tuple(map(code.count, written)) == FORMS[form]


def test_a_torch_without_the_means_keeps_the_operator(monkeypatch):
    monkeypatch.delattr("torch._inductor.ir.DynamicScalar")
    assert not unpack_integers.write_as_list.__wrapped__()


def test_a_wrapper_in_cpp_has_no_lists():
    def program(sent, got, rows):
        return (exchange(rows, to_list(got * 1), to_list(sent * 1)),)

    with inductor_config.patch(cpp_wrapper=True):
        graph, report = unpacked(program, SENT, GOT, ROWS)
    assert taken(graph) == [1] * 6
    assert {one.detail for one in report.skipped} == {"Inductor's cpp_wrapper is on"}
