"""What must come before what, one kind of edge at a time."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.errors import ContractViolation
from moe_compile.graph.edit import reorder
from moe_compile.graph.precedence import awaited, find_predecessors
from moe_compile.graph.query import is_launch, is_wait, overload_name
from tests.scheduled_layers import c10d, one_rank_group


def send(x):
    return c10d.all_to_all_single(x, [4], [4], one_rank_group())


def graph_of(program, tracing_mode="fake"):
    one_rank_group()
    return make_fx(program, tracing_mode=tracing_mode)(torch.ones(4, 3)).graph


def edges(program, tracing_mode="fake"):
    """Return the calls of the graph in order, and who precedes whom."""
    graph = graph_of(program, tracing_mode)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return calls, find_predecessors(graph)


def named(calls, op):
    return [node for node in calls if overload_name(node) == op]


def test_a_view_is_read_after_a_write_to_its_base():
    def program(x):
        base = x + 1
        view = base.view(-1)
        base.add_(1)
        return view * 2, base

    calls, before = edges(program)
    (write,), (read,) = named(calls, "aten::add_"), named(calls, "aten::mul")
    assert write in before[read]


def test_a_base_is_written_after_reads_of_its_view():
    def program(x):
        base = x + 1
        read = base.view(-1) * 2
        base.add_(1)
        return read, base

    calls, before = edges(program)
    (write,), (read,) = named(calls, "aten::add_"), named(calls, "aten::mul")
    assert read in before[write]


def test_two_writes_keep_their_order():
    def program(x):
        base = x + 1
        views = base.view(-1), base.view(3, 4)
        views[0].mul_(2)
        views[1].add_(1)
        return base

    calls, before = edges(program)
    (first,), (second,) = named(calls, "aten::mul_"), named(calls, "aten::add_")
    assert first in before[second]


def test_what_is_sent_is_written_after_the_wait():
    def program(x):
        sent = x + 1
        received = c10d.wait_tensor(send(sent))
        sent.zero_()
        return received, sent

    calls, before = edges(program)
    (wait,), (write,) = filter(is_wait, calls), named(calls, "aten::zero_")
    assert wait in before[write]


def reduced_in_place(x):
    reduced = x + 1
    wait = c10d.wait_tensor(c10d.all_reduce_(reduced, "sum", one_rank_group()))
    return wait, reduced * 2


def test_what_a_collective_writes_in_place_is_read_after_the_wait():
    calls, before = edges(reduced_in_place)
    (wait,), (read,) = filter(is_wait, calls), named(calls, "aten::mul")
    assert wait in before[read]


def test_an_order_that_reads_before_the_write_is_refused():
    graph = graph_of(reduced_in_place)
    nodes = list(graph.nodes)
    reorder(nodes)
    assert list(graph.nodes) == nodes
    (read,) = named(nodes, "aten::mul")
    (wait,) = filter(is_wait, nodes)
    nodes.remove(read)
    nodes.insert(nodes.index(wait), read)
    with pytest.raises(ContractViolation, match=f"{read.name} would be placed before"):
        reorder(nodes)


def test_the_results_of_two_waits_for_one_launch_are_one_tensor():
    def program(x):
        first = c10d.wait_tensor(send(x))
        second = c10d.wait_tensor(first)
        read = second * 2
        first.add_(1)
        return read, first

    calls, before = edges(program)
    (write,), (read,) = named(calls, "aten::add_"), named(calls, "aten::mul")
    assert read in before[write]


def test_what_is_waited_for_is_found_through_items_and_views_and_nothing_else():
    def program(x):
        items = c10d.all_gather_into_tensor_coalesced([x, x + 1], 1, one_rank_group())
        waits = [c10d.wait_tensor(items[1]), c10d.wait_tensor(items[0].view(-1))]
        return *waits, c10d.wait_tensor(items[0] * 2)

    calls, _ = edges(program)
    (launch,), waits = filter(is_launch, calls), filter(is_wait, calls)
    assert [awaited(wait) for wait in waits] == [launch, launch, None]


def test_random_ops_keep_their_order():
    calls, before = edges(lambda x: (torch.rand_like(x), torch.randn_like(x)))
    assert calls[0] in before[calls[1]]


def test_checks_that_nothing_reads_keep_their_order():
    def program(x):
        torch.ops.aten._assert_async.msg(x.sum() > 0, "first")
        torch.ops.aten._assert_async.msg(x.max() > 0, "second")
        return x + 1

    calls, before = edges(program)
    first, second = named(calls, "aten::_assert_async")
    assert first in before[second]


def test_copies_into_inputs_follow_each_other_and_earlier_waits():
    def program(x):
        received = c10d.wait_tensor(send(x + 1))
        x.copy_(torch.zeros(4, 3))
        x.view(-1).copy_(torch.ones(12))
        return received

    calls, before = edges(program)
    (wait,), (first, second) = filter(is_wait, calls), named(calls, "aten::copy_")
    assert wait in before[first]
    assert first in before[second]


def test_a_launch_and_a_host_read_need_one_another_for_data_only():
    """All ranks launch in one order: wherever one reads, what it waits for is launched."""

    def program(x):
        early = send(x)
        number = x.sum().to(torch.int64).item()
        received = c10d.wait_tensor(send(x + 1))
        other = received.sum().to(torch.int64).item()
        return c10d.wait_tensor(early) + number, received, c10d.wait_tensor(send(x + other))

    calls, before = edges(program, tracing_mode="symbolic")
    early, late, needs = launches(calls)
    first, second = named(calls, "aten::_local_scalar_dense")
    above = {node: reached(before, node) for node in (early, late, needs, first, second)}
    assert not above[early] and early not in above[first]
    assert not {early, first} & above[late]
    assert late in above[second] and second in above[needs] and first not in above[needs]


def reached(before, node):
    """Return everything that must come before `node` and is a launch or a host read."""
    found, todo = set(), [node]
    while todo:
        todo += (new := set(before[todo.pop()]) - found)
        found |= new
    return {n for n in found if is_launch(n) or overload_name(n) == "aten::_local_scalar_dense"}


def test_every_edge_follows_the_graph():
    def program(x):
        base = x + torch.rand_like(x)
        received = c10d.wait_tensor(send(base))
        base.add_(received)
        x.copy_(base)
        return received

    calls, before = edges(program)
    place = {node: i for i, node in enumerate(calls)}
    assert all(place.get(p, -1) < place[n] for n in calls for p in before[n])


def test_an_assertion_stays_between_the_launches_around_it_where_ranks_have_other_graphs():
    """Where it fails every rank ends there: none may wait for what another did not launch."""

    def program(x):
        sent = send(x)
        torch.ops.aten._assert_scalar(x.shape[0] == 4, "four rows")
        return sent, send(x * 2)

    graph = graph_of(program)
    (first, second), (asserted,) = launches(graph.nodes), named(graph.nodes, "aten::_assert_scalar")
    before = find_predecessors(graph, keeps_program=True)
    assert first in before[asserted] and asserted in before[second]
    before = find_predecessors(graph)
    assert first not in before[asserted] and asserted not in before[second]


def sized(x, counts):
    """Return what is sent of `x` in sizes that the host reads, and these."""
    sizes = [count.item() for count in counts.unbind()]
    total = torch.sym_sum(sizes)
    torch.ops.aten._assert_scalar(total <= x.shape[0], "more rows than there are")
    received = c10d.all_to_all_single(x[:total], [total], sizes, one_rank_group())
    return c10d.wait_tensor(received), sizes


@pytest.mark.parametrize("whole", [False, True])
def test_sizes_that_an_assertion_refuses_are_not_sent(whole):
    """The second has sizes of its own, or those of the first, with a sum that torch then knows."""

    def program(x, first, second):
        sent, sizes = sized(x, first)
        if whole:
            is_known = torch.sym_sum(sizes) == 3
            torch.ops.aten._assert_scalar(is_known, "three rows")
            torch._check(is_known)
            return sent, c10d.all_to_all_single(x[:3], [3], sizes, one_rank_group())
        return sent, sized(x, second)[0]

    one_rank_group()
    counts = torch.tensor([1, 2])
    graph = make_fx(program, tracing_mode="symbolic")(torch.ones(4, 3), counts, counts).graph
    before = find_predecessors(graph)
    first, second = launches(graph.nodes)
    of_first, last = named(graph.nodes, "aten::_assert_scalar")
    assert of_first in before[first]
    assert last in before[second] and first not in before[last]
    assert last not in before[first] and of_first not in before[second]
    assert (of_first in before[last]) is whole


def test_a_copy_into_an_input_stays_behind_assertions_and_those_after_it_behind_it():
    def program(x, counts):
        first, second = (count.item() for count in counts.unbind())
        torch.ops.aten._assert_scalar(first >= 0, "first")
        x.copy_(torch.zeros(4, 3))
        torch.ops.aten._assert_scalar(second >= 0, "second")

    x, counts = torch.ones(4, 3), torch.tensor([1, 2])
    graph = make_fx(program, tracing_mode="symbolic")(x, counts).graph
    before, asserted = find_predecessors(graph), named(graph.nodes, "aten::_assert_scalar")
    (copy,) = named(graph.nodes, "aten::copy_")
    assert asserted[0] in before[copy] and copy in before[asserted[-1]]


def test_what_an_assertion_about_a_tensor_guards_cannot_be_told():
    def program(x):
        sent = send(x)
        torch.ops.aten._assert_async.msg(x.sum() > 0, "rows")
        return sent, send(x * 2)

    calls, before = edges(program)
    (first, second), (asserted,) = launches(calls), named(calls, "aten::_assert_async")
    assert asserted in before[second] and first not in before[asserted]


def launches(calls):
    return [node for node in calls if is_launch(node)]


@torch.library.custom_op("megamoe_tests::sums_over_ranks", mutates_args=())
def sums_over_ranks(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@sums_over_ranks.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.parametrize("keeps_program", [True, False])
def test_launches_stay_on_their_side_of_what_may_communicate(keeps_program):
    """A collective inside another operator was run under an exchange, on one rank only."""

    def program(x):
        early = c10d.wait_tensor(send(x))
        y = torch.ops.megamoe_tests.sums_over_ranks(x + 1)
        return early, y, c10d.wait_tensor(send(x * 2))

    graph = graph_of(program)
    (inside,) = named(graph.nodes, "megamoe_tests::sums_over_ranks")
    first, second = filter(is_launch, graph.nodes)
    before = find_predecessors(graph, keeps_program=keeps_program)
    assert (first in before[inside]) is keeps_program
    assert (inside in before[second]) is keeps_program
