"""Collectives are slower beside compute, as long as it runs; no order is faster for it."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_compile.schedule.list_schedule import Policy, list_schedule, nearest_launch
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import COMPUTE, Clock, simulate
from tests.schedule.test_list_schedule import exchange, letters, traced

SHARES = st.sampled_from([0.0, 0.2, 0.4, 1.5])
TIMES = st.just(0.0) | st.floats(0.1, 10.0)
GROUPS = ("near", "far")


def problem_in_order(steps, contention=0.0, host_us=None, reads=(), **overlap_slowdown):
    """Return what `simulate` needs to know of steps that run in this order.

    A step is the time of compute, the group of a launch with its collective's time, or the
    index of the launch that is waited for. The host takes `host_us` for each, and waits at `reads`.
    """
    return ScheduleProblem(
        nodes=(),
        before=(),
        after=(),
        compute_us=tuple(step if isinstance(step, float) else 0.0 for step in steps),
        link_us=tuple(step[1] if isinstance(step, tuple) else 0.0 for step in steps),
        launches=(),
        next_launch={},
        group_of={i: step[0] for i, step in enumerate(steps) if isinstance(step, tuple)},
        awaits={i: step for i, step in enumerate(steps) if isinstance(step, int)},
        is_follower=(),
        urgency=(),
        path_us=(),
        first_result=(),
        host_us=tuple(host_us or [0.0] * len(steps)),
        reads=frozenset(reads),
        contention=contention,
        overlap_slowdown=overlap_slowdown,
    )


@st.composite
def orders(draw):
    """Draw compute, launches, and waits for some of those launched."""
    steps = []
    for _ in range(draw(st.integers(1, 14))):
        launched = [i for i, step in enumerate(steps) if isinstance(step, tuple)]
        kinds = [TIMES, st.tuples(st.sampled_from(GROUPS), TIMES)]
        steps.append(draw(st.one_of(*kinds, *([st.sampled_from(launched)] if launched else []))))
    return steps


def time_of(problem):
    return simulate(problem, range(len(problem.compute_us)))


@given(steps=orders(), contention=SHARES, near=SHARES, far=SHARES)
def test_an_order_is_never_faster_with_the_slowdown(steps, contention, near, far):
    free = time_of(problem_in_order(steps, contention))
    slowed = time_of(problem_in_order(steps, contention, near=near, far=far))
    assert slowed.step_us >= free.step_us * (1 - 1e-9)
    if not near and not far:
        assert slowed == free
    assert (slowed.compute_us, slowed.exchange_us) == (free.compute_us, free.exchange_us)
    worst = (1 + max(contention, near, far)) * (free.compute_us + free.exchange_us)
    assert slowed.step_us <= worst * (1 + 1e-9)


def test_what_is_sent_under_compute_takes_longer_by_its_share():
    """Of 10 to send 4 are there after 6 of compute; the rest takes 6 more, then 3 of compute."""
    steps = [("far", 10.0), 6.0, 0, 3.0]
    assert time_of(problem_in_order(steps)).step_us == 10.0 + 3.0
    found = time_of(problem_in_order(steps, far=0.5))
    assert found.step_us == pytest.approx(6.0 + 6.0 + 3.0)
    assert found.exposed_us == pytest.approx(6.0)
    both = time_of(problem_in_order(steps, 0.25, far=0.5))  # 6 of compute in 7.5, 5 sent meanwhile
    assert both.step_us == pytest.approx(7.5 + 5.0 + 3.0)


def test_a_slowed_collective_holds_up_the_next_of_its_group_alone():
    """Under 12 of compute 4 and 4 near take 6 each; 11 far take 11, and none waits for another."""
    steps = [("near", 4.0), ("near", 4.0), ("far", 11.0), 12.0]
    assert time_of(problem_in_order([*steps, 1], near=0.5)).step_us == pytest.approx(12.0)
    slower = time_of(problem_in_order([*steps, 1], near=1.0))  # 6 of 8 by 12, then 2 alone
    assert slower.step_us == pytest.approx(12.0 + 2.0)
    assert time_of(problem_in_order([*steps, 2], far=0.5)).step_us == pytest.approx(12.0 + 3.0)


def test_a_scheduler_does_not_take_an_exchange_to_be_over_that_compute_put_off():
    """Alone it is over under the fourth product, beside compute under the fifth."""

    def program(x):
        return exchange(exchange(x) @ x), *(x @ (x + i) for i in range(7))

    problem, _ = traced(program, torch.ones(16, 16))
    product_us = max(problem.compute_us)
    problem = replace(problem, link_us=tuple(3.2 * product_us * (us > 0) for us in problem.link_us))
    (group,) = set(problem.group_of.values())
    slower = replace(problem, overlap_slowdown={group: 0.5})
    found = [letters(p, list_schedule(p, Policy(key=nearest_launch))) for p in (problem, slower)]
    assert [text[: text.index("W")] for text in found] == ["L" + "m" * 4, "L" + "m" * 5]


@given(orders(), SHARES, SHARES, SHARES)
def test_spans_of_a_run_are_those_of_its_time(steps, contention, near, far):
    """Each takes its work and at most the slowdown of it; a stream serves one at a time."""
    problem = problem_in_order(steps, contention, near=near, far=far)
    clock = Clock.that_keeps_spans(problem)
    for node in range(len(steps)):
        clock.run(node)
    spans = list(clock.spans())
    work = {i: step for i, step in enumerate(steps) if isinstance(step, float) and step}
    work |= {i: step[1] for i, step in enumerate(steps) if isinstance(step, tuple)}
    assert {span.node for span in spans} == set(work)
    slowest = {COMPUTE: contention, "near": near, "far": far}
    for span in spans:
        least, length = work[span.node], span.end_us - span.start_us
        assert least - 1e-6 <= length <= least * (1 + slowest[span.stream]) + 1e-6
    for stream in slowest:
        own = [span for span in spans if span.stream == stream]
        assert all(a.end_us <= b.start_us + 1e-6 for a, b in itertools.pairwise(own))
    ends = max((span.end_us for span in spans), default=0.0)
    assert ends == pytest.approx(time_of(problem).step_us)
