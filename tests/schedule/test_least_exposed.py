"""No schedule hides more of its collectives than the bound says can be hidden."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from moe_compile.schedule.choose_schedule import POLICIES
from moe_compile.schedule.list_schedule import incoming_order, list_schedule
from moe_compile.schedule.simulate import least_exposed_us, simulate
from tests.schedule.test_list_schedule import exchange, problem_of, traced
from tests.schedule.test_overlap_slowdown import SHARES, TIMES, problem_in_order, time_of
from tests.scheduled_layers import ChunkedMoE, one_rank_group, post_grad_graphs
from tests.slow_parameters import slow_but

X, WEIGHT = torch.ones(64, 64), torch.ones(64, 64)


def one_stream(x, w):
    """Nothing runs beside its exchanges."""
    return exchange(exchange(x @ w) @ w)


def product_beside(x, w):
    """One product is needed by neither exchange, and needs none."""
    return exchange(exchange(x @ w) @ w), x @ w @ w


def product_between(x, w):
    """What the second launch needs, and not the first exchange: beside the first alone."""
    first = exchange(x @ w)
    return exchange(x @ w @ w) + first


def orders(problem):
    yield tuple(range(len(problem.nodes)))
    yield incoming_order(problem)
    for policy in POLICIES:
        yield list_schedule(problem, policy)


@pytest.mark.parametrize("program", [one_stream, product_beside, product_between])
def test_the_best_schedule_of_small_programs_reaches_the_bound(program):
    problem, _ = traced(program, X, WEIGHT)
    least = least_exposed_us(problem)
    found = [simulate(problem, order).exposed_us for order in orders(problem)]
    assert min(found) == pytest.approx(least) and least > 0.0


def test_what_can_hide_an_exchange_is_counted_once():
    problem, _ = traced(product_beside, X, WEIGHT)
    beside = sorted(us for us in problem.compute_us if us)
    assert least_exposed_us(problem) == pytest.approx(sum(problem.link_us) - sum(beside[-2:]))
    alone, _ = traced(one_stream, X, WEIGHT)
    assert least_exposed_us(alone) == pytest.approx(sum(alone.link_us))


@pytest.mark.parametrize("num_chunks", slow_but([1, 2], [1, 2, 4]))
def test_no_schedule_of_a_layer_is_below_the_bound(num_chunks):
    torch.manual_seed(0)
    layer = ChunkedMoE(64, 64, 8, 2, one_rank_group(), num_chunks, shared=64)
    x = torch.randn(128, 64, dtype=torch.bfloat16, requires_grad=True)
    for gm in post_grad_graphs(layer, x):
        problem, _ = problem_of(gm.graph)
        for factor in (1.0, 30.0, 300.0):
            slower = replace(problem, link_us=tuple(factor * us for us in problem.link_us))
            least = least_exposed_us(slower)
            beside = dict.fromkeys(slower.group_of.values(), 0.4)
            for order in orders(slower):
                exposed_us = simulate(slower, order).exposed_us
                assert exposed_us >= least - 1e-6
                worse = replace(slower, overlap_slowdown=beside)
                assert simulate(worse, order).exposed_us >= exposed_us * (1 - 1e-9)
        assert 0.0 < least < sum(slower.link_us)


def test_a_graph_without_collectives_exposes_nothing():
    problem, _ = traced(lambda x, w: x @ w, X, WEIGHT)
    assert least_exposed_us(problem) == 0.0


@given(
    sent_us=st.floats(1.0, 60.0),
    kernels=st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=12),
    other=st.none() | st.tuples(st.integers(1, 12), TIMES),
    contention=SHARES,
    far=SHARES,
)
@example(sent_us=99.0, kernels=[(0.1, 5.0)] * 12, other=None, contention=0.0, far=0.0)
@example(sent_us=99.0, kernels=[(5.0, 5.0)] * 2, other=(2, 10.0), contention=0.0, far=0.0)
def test_no_order_is_below_the_bound_with_host_and_slowdown(
    sent_us, kernels, other, contention, far
):
    """Sent under kernels that the host launches, among them a launch or a read of its own time."""
    steps = [("far", sent_us), *(us for us, _ in kernels)]
    host_us = [0.0, *(us for _, us in kernels)]
    reads = []
    if other is not None:
        place = min(other[0], len(steps))
        steps.insert(place, 0.0)
        host_us.insert(place, other[1])
        reads = [place] if other[0] % 2 else []
    problem = problem_in_order([*steps, 0], contention, [*host_us, 0.0], reads, far=far)
    assert time_of(problem).exposed_us >= least_exposed_us(anywhere(problem)) - 1e-6


def anywhere(problem):
    """Return `problem`, whose nodes may stand beside any of its collectives."""
    size = len(problem.compute_us)
    launches = tuple(i for i in range(size) if i in problem.group_of)
    inf = (float("inf"),) * size
    return replace(
        problem, nodes=(None,) * size, before=((),) * size, launches=launches, urgency=inf
    )


def test_the_bound_counts_what_a_hidden_collective_costs():
    """10 sent under 30 of compute take 15 by the slowdown, of which compute loses a fifth."""
    steps = [("far", 10.0), 30.0, ("far", 0.0), 2]
    slowed = problem_in_order(steps, 0.25, far=0.5)
    assert time_of(slowed).exposed_us == pytest.approx(3.0)
    assert least_exposed_us(anywhere(slowed)) == pytest.approx(3.0)
    steps[1] = 4.0  # hides 4 * 1.25 / 1.5 at 0.3 each, the rest stands still
    slowed = problem_in_order(steps, 0.25, far=0.5)
    assert least_exposed_us(anywhere(slowed)) == pytest.approx(10 - 0.7 * 4 * 1.25 / 1.5)
