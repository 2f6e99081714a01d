"""What a CUDA graph cannot hold is marked for Inductor; no value changes."""

import torch

from moe_compile.graph.precedence import is_view
from moe_compile.ops.captures import MOVING_INPUT, OF_STEP, STEP_SIZES
from passes.bound_captures import BoundCaptures
from tests.capture import state
from tests.device_programs import exchange, to_list, traced

GATHERED = {"gathered_inputs": frozenset({1})}


def program(rows, weight, counts):
    sent, got = to_list(counts.cpu())
    received = exchange(rows, [got], [sent])
    turned = weight.t()
    product = received.t() @ received
    return received.t().sum(1), product, received @ turned, turned, weight


def graph_of(prefix="primals", *, is_backward=False, **settings):
    """Return the graph as AOTAutograd names its inputs, after the pass, and the report."""
    rows, weight, counts = torch.ones(8, 4), torch.ones(4, 4), torch.ones(2, dtype=torch.int64)
    gm = traced(program, rows, weight, counts)
    for number, node in enumerate(gm.graph.find_nodes(op="placeholder"), 1):
        node.name = node.target = f"{prefix}_{number}"
    now = state()
    now.is_backward = is_backward
    for name, value in {"is_captured": True, "num_inputs": 3, **settings}.items():
        setattr(now, name, value)
    report = BoundCaptures().run(gm.graph, now)
    gm.graph.lint()
    return gm, report, now


def read_by_another_name(gm):
    """Return the inputs that are, once it is sure that all but the output reads them so."""
    renamed = gm.graph.find_nodes(op="call_function", target=MOVING_INPUT)
    for mark in renamed:
        (node,) = mark.args
        assert {user.op for user in node.users if user is not mark and not is_view(user)} <= {
            "output"
        }
        assert mark.meta["val"] is node.meta["val"] and mark.users
    return [mark.args[0].name for mark in renamed]


def test_every_size_that_the_host_reads_is_named_once_behind_all_others():
    gm, _, _ = graph_of()
    *_, marked, output = gm.graph.nodes
    assert (marked.target, output.op) == (STEP_SIZES, "output")
    symbols = [size.meta["val"].node.expr for size in marked.args[0]]
    assert len(symbols) == len(set(symbols)) == 2
    assert read_by_another_name(gm) == []


def test_an_operator_whose_result_has_another_size_mentions_one_of_what_it_reads():
    """Through a view. The product of all rows has their size; that of two Inductor's node knows."""
    gm, report, _ = graph_of()
    (mark,) = gm.graph.find_nodes(op="call_function", target=OF_STEP)
    (reader,) = mark.users
    assert list(report.applied) == [reader.name]
    assert (reader.target, reader.args[0]) == (torch.ops.aten.sum.dim_IntList, mark)
    assert is_view(mark.args[0]) and mark.meta["val"] is mark.args[0].meta["val"]
    size = mark.args[1].meta["val"].node.expr
    assert size in mark.meta["val"].shape[1].node.expr.free_symbols


def test_weights_that_fsdp_gathers_are_read_by_another_name_and_returned_as_they_came():
    gm, _, now = graph_of(steady_inputs=frozenset({2}), **GATHERED)
    assert read_by_another_name(gm) == ["primals_2"]
    assert now.steady_names == {"primals_3"}
    *_, product, turned, weight = gm.graph.output_node().args[0]
    assert (weight.name, turned.args) == ("primals_2", (weight,))  # saved for the backward: no copy
    read = product.args[1]
    assert read.target is turned.target and read.args[0].target is MOVING_INPUT
    assert set(turned.users) == {gm.graph.output_node()}


def test_the_backward_goes_by_the_names_of_the_forward():
    """Torch takes every input of the program for one that stays, in the backward graph."""
    gm, _, _ = graph_of(is_backward=True, steady_names={"primals_2"})
    assert read_by_another_name(gm) == ["primals_1", "primals_3"]
    gm, _, _ = graph_of("saved", is_backward=True)
    assert read_by_another_name(gm) == []  # these are taken for what they are


def test_where_inputs_cannot_be_told_apart_all_may_move():
    gm, _, _ = graph_of(num_inputs=4, steady_inputs=frozenset({0, 1, 2}))
    assert len(read_by_another_name(gm)) == 3


def test_what_the_graph_writes_into_keeps_its_name():
    def written(x):
        return torch.ops.aten.copy_.default(x, x * 2)

    gm = traced(written, torch.ones(4))
    (x,) = gm.graph.find_nodes(op="placeholder")
    x.name = x.target = "primals_1"
    now = state()
    now.is_captured = now.is_backward = True
    BoundCaptures().run(gm.graph, now)
    assert read_by_another_name(gm) == []


def test_without_cuda_graphs_nothing_changes():
    gm, report, _ = graph_of(is_captured=False, **GATHERED)
    assert not report.changed
    assert all(node.target not in (MOVING_INPUT, OF_STEP, STEP_SIZES) for node in gm.graph.nodes)


def test_the_operators_hand_on_what_they_are_given():
    given = torch.randn(2)
    assert torch.equal(MOVING_INPUT(given), given) and torch.equal(OF_STEP(given, 2), given)
    assert STEP_SIZES([1, 2]) is None
