"""A wait for several tensors, as torch 2.15 writes it, is one for each before any pass looks."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.graph.query import is_launch, is_wait, overload_name, waits_on
from moe_compile.testing.wrapper_order import event_letters, products_under, wrapper_events
from passes.normalize_exchanges import TOGETHER
from passes.sort_nodes import SortNodes
from tests.capture import dynamo_graphs, state

C10D = torch.ops._c10d_functional


@pytest.fixture(scope="module", autouse=True)
def operator():
    """The operator, which older torch lacks."""
    if hasattr(C10D, "wait_tensors"):
        yield
        return
    library = torch.library.Library("_c10d_functional", "FRAGMENT")
    library.define("wait_tensors(Tensor[] tensors) -> Tensor[]")
    library.impl("wait_tensors", lambda tensors: [t.clone() for t in tensors], "CPU")
    library.impl("wait_tensors", lambda tensors: [torch.empty_like(t) for t in tensors], "Meta")
    yield
    library._destroy()


@pytest.fixture
def program(fake_ranks):
    def sums(x):
        both = C10D.all_reduce_coalesced([x, x * 2], "sum", fake_ranks.group_name)
        first, second = C10D.wait_tensors(both)
        return first.sin(), second.cos()

    return sums


def check(graph):
    assert [n for n in graph.nodes if overload_name(n) == TOGETHER] == []
    (launch,) = filter(is_launch, graph.nodes)
    waits = list(filter(is_wait, graph.nodes))
    assert [[n.name for n in waits_on(item)] for item in launch.users] == [[w.name] for w in waits]
    read = [[str(user.target) for user in wait.users] for wait in waits]
    assert ["sin" in one for ((one,), _) in zip(read, waits, strict=True)] == [True, False]
    graph.lint()


def test_in_the_programs_graph(program):
    (gm,) = dynamo_graphs(program, torch.ones(4))
    check(gm.graph)


def test_in_autograds_graph(program):
    gm = make_fx(program, tracing_mode="fake")(torch.ones(4))
    assert any(overload_name(n) == TOGETHER for n in gm.graph.nodes)
    SortNodes().run(gm.graph, state())
    check(gm.graph)
    assert all("val" in n.meta for n in gm.graph.nodes if is_wait(n))


def test_in_generated_code():
    events = wrapper_events(
        "def call(args):\n"
        "    buf0 = torch.ops._c10d_functional.all_to_all_single.default(a, [2], [2], '7')\n"
        "    buf1 = torch.ops._c10d_functional.all_to_all_single.default(b, [2], [2], '7')\n"
        "    extern_kernels.mm(a, b, out=c)\n"
        "    torch.ops._c10d_functional.wait_tensors.default([buf0, buf1])\n"
        "    extern_kernels.mm(a, b, out=c)\n"
    )
    assert event_letters(events) == "LLmWm"
    assert products_under(events) == (1, 1)
