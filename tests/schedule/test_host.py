"""The host takes its time: reads wait for the device, launches and kernels for the host."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.cost.cost_model import estimate_costs
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import overload_name
from moe_compile.hardware.profile import HostCosts
from moe_compile.schedule.choose_schedule import choose_schedule, launch_early
from moe_compile.schedule.liveness import Liveness
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import simulate
from tests.schedule.test_list_schedule import SLOW_LINK, letters
from tests.schedule.test_overlap_slowdown import orders, problem_in_order, time_of
from tests.scheduled_layers import c10d, one_rank_group

HOST = HostCosts(
    read_us=20.0, integer_us=0.5, launch_us=10.0, launch_us_per_rank=90.0, kernel_us=5.0
)


@pytest.mark.parametrize(
    ("steps", "host_us", "step_us"),
    [
        ([10.0, 10.0, 10.0], [1.0, 1.0, 1.0], 1.0 + 30.0),  # ahead
        ([1.0, 1.0, 1.0], [5.0, 5.0, 5.0], 15.0 + 1.0),  # too short for it
        ([10.0, ("link", 4.0), 1], [1.0, 30.0, 0.0], 1.0 + 30.0 + 4.0),
    ],
    ids=["long kernels", "short kernels", "a launch"],
)
def test_nothing_starts_before_the_host_is_done_with_it(steps, host_us, step_us):
    assert time_of(problem_in_order(steps, host_us=host_us)).step_us == step_us


def test_a_read_waits_for_all_that_was_queued_and_the_device_for_the_host_behind_it():
    steps, host_us = [10.0, 10.0, 0.0, 5.0], [1.0, 1.0, 20.0, 1.0]
    found = time_of(problem_in_order(steps, host_us=host_us, reads=[2]))
    assert found.step_us == 1.0 + 20.0 + 20.0 + 1.0 + 5.0
    assert (found.compute_us, found.exposed_us, found.host_us) == (27.0, 20.0, 20.0)
    waits = [("link", 50.0), 0, *steps]
    later = time_of(problem_in_order(waits, host_us=[0.0, 0.0, *host_us], reads=[4]))
    assert later.step_us == 50.0 + 20.0 + 20.0 + 1.0 + 5.0


@given(steps=orders(), data=st.data())
def test_an_order_is_never_faster_with_the_host(steps, data):
    taken = st.lists(st.floats(0.0, 10.0), min_size=len(steps), max_size=len(steps))
    reads = data.draw(st.sets(st.integers(0, len(steps) - 1)))
    free = time_of(problem_in_order(steps))
    assert time_of(problem_in_order(steps, reads=reads)) == free
    host_us = data.draw(taken)
    slower = time_of(problem_in_order(steps, host_us=host_us, reads=reads))
    assert free.step_us <= slower.step_us <= free.step_us + sum(host_us) * (1 + 1e-9)


def launched(x):
    return c10d.all_to_all_single(x, [64], [64], one_rank_group())


def problem_of(program, *inputs, host=HOST, **how):
    one_rank_group()
    graph = make_fx(program, tracing_mode="symbolic")(*inputs).graph
    sizes = NominalSizes({}, rows=8)
    sizes.learn(graph)
    costs = estimate_costs(graph, sizes, replace(SLOW_LINK, host=host))
    problem = ScheduleProblem.of(graph, costs, **how)
    return problem, Liveness.of(problem.nodes, sizes)


def taken(counts):
    return [counts[i].item() for i in range(counts.shape[0])]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_node_of_a_read_waits_and_each_integer_takes_time(device):
    """The copy to the host; of a tensor that is not copied the first integer."""

    def program(counts, x):
        first, second = taken((counts + 1).to("cpu"))
        return x[:first], x[:second]

    counts, x = torch.ones(2, dtype=torch.int64, device=device), torch.ones(8, 8, device=device)
    graph = make_fx(program, tracing_mode="symbolic")(counts, x).graph
    sizes = NominalSizes({}, rows=8)
    sizes.learn(graph)
    costs = estimate_costs(graph, sizes, replace(SLOW_LINK, host=HOST))
    waits = [overload_name(node) for node in graph.nodes if costs[node].waits_for_device]
    integers = [costs[n].host_us for n in graph.nodes if "_local_scalar" in overload_name(n)]
    copy_us = [costs[n].host_us for n in graph.nodes if overload_name(n) == "aten::_to_copy"]
    if device == "cpu":
        assert waits == ["aten::_local_scalar_dense"] and integers == [20.5, 0.5]
    else:
        assert waits == ["aten::_to_copy"] and integers == [0.5, 0.5]
        assert copy_us == [20.0 + 0.25 * 5.0]  # of a kernel of few integers


def read_then_sent(x, w):
    """One number is read; two exchanges need it, and four products need neither."""
    number = x.sum().to(torch.int64).item()
    first = launched(x * number)
    products = [w @ (w + i) for i in range(4)]
    return *products, *map(c10d.wait_tensor, (first, launched(x + number)))


def test_launches_behind_a_read_let_the_device_compute_first():
    """The device would stand still while the host launches them, longer than the link takes."""
    problem, liveness = problem_of(read_then_sent, torch.ones(64, 64), torch.ones(64, 64))
    problem = replace(problem, link_us=tuple(us / 4 for us in problem.link_us))
    free = replace(problem, host_us=(0.0,) * len(problem.nodes))
    orders = [choose_schedule(p, liveness, 9.0).chosen.order for p in (free, problem)]
    assert [letters(problem, order) for order in orders] == ["LLmmmmWW", "mLLmmmWW"]
    eager_us, chosen_us = (simulate(problem, order).step_us for order in orders)
    assert eager_us > chosen_us + 190.0


def two_sent(x, w):
    """Two exchanges can be launched at once; products need what the first receives."""
    first, second = launched(x), launched(x + 1)
    received = c10d.wait_tensor(first)
    return [received @ (w + i) for i in range(4)], c10d.wait_tensor(second)


def test_a_launch_waits_for_the_first_exchange_where_products_behind_it_hide_the_host():
    """The host takes longer for the second launch than the link for the first exchange."""
    problem, liveness = problem_of(two_sent, torch.ones(64, 64), torch.ones(64, 64))
    problem = replace(problem, link_us=tuple(us / 200 for us in problem.link_us))
    order = choose_schedule(problem, liveness, 9.0).chosen.order
    launch_us = problem.host_us[problem.launches[0]]
    at_once = [*order]
    at_once.remove(problem.launches[1])
    at_once.insert(at_once.index(problem.launches[0]) + 1, problem.launches[1])
    assert letters(problem, order).startswith("LWm") and letters(problem, at_once)[:2] == "LL"
    times_us = [simulate(problem, one).step_us for one in (order, at_once)]
    assert times_us[1] > times_us[0] + launch_us / 2


def test_a_launch_is_moved_up_to_where_the_host_has_time_for_it():
    """Behind the read it has none; behind the product that was launched since it has."""
    problem, _ = problem_of(read_then_sent, torch.ones(64, 64), torch.ones(64, 64))
    free = replace(problem, host_us=(0.0,) * len(problem.nodes))
    came = range(len(problem.nodes))
    found = [letters(p, launch_early(p, came)) for p in (free, problem)]
    assert (letters(problem, came), *found) == ("LmmmmLWW", "LLmmmmWW", "LmLmmmWW")


def two_parts(w, *parts):
    """Each multiplies, exchanges counts, reads them, sends as many rows and multiplies these."""
    rows = [x @ w @ w @ w @ w for x in parts]
    counts = [c10d.all_to_all_single(r[0, :2].long(), [2], [2], one_rank_group()) for r in rows]
    sizes = [taken(c10d.wait_tensor(one) + 1) for one in counts]
    for one in sizes:
        torch.ops.aten._assert_scalar(torch.sym_sum(one) <= 64, "as many rows as there are")
    sent = [r[: torch.sym_sum(one)] for r, one in zip(rows, sizes, strict=True)]
    received = [
        c10d.all_to_all_single(s, [s.shape[0]], [s.shape[0]], one_rank_group()) for s in sent
    ]
    return [c10d.wait_tensor(one) @ w for one in received]


def test_a_part_sends_its_rows_before_the_next_part_reads_its_counts():
    """Both were read one after the other, and what part 2 computes hid an exchange of counts."""
    x = torch.ones(64, 64)
    problem, liveness = problem_of(two_parts, x, x, x, is_in_parts=True)
    order = choose_schedule(problem, liveness, 9.0).chosen.order
    first, second = (k for k, node in enumerate(order) if node in problem.reads)
    between = order[first:second]
    sent = next(node for node in between if node in problem.group_of)
    computed_us = sum(problem.compute_us[node] for node in between)
    assert computed_us >= problem.link_us[sent] > problem.link_us[problem.launches[0]]
    assert letters(problem, order).startswith("mmmmLWLmmmmLW")
