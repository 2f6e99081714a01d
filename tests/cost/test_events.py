"""Streams serve one task at a time; compute and collectives stretch exactly where they overlap."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compile.cost.events import Streams
from moe_compile.cost.tasks import (
    COMPUTE,
    LINK,
    NODE_LINK,
    STREAMS,
    Priority,
    TaskList,
    run_in_order,
    run_tasks,
)

TIMES = st.floats(0.1, 10.0)


@st.composite
def task_lists(draw):
    """Any DAG over all streams: every task needs some of those before it."""
    tasks = TaskList()
    for number in range(draw(st.integers(1, 12))):
        needs = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        stream = draw(st.sampled_from(STREAMS))
        tasks.add(str(number), draw(TIMES), sorted(needs), stream)
    return tasks.tasks


SHARES = st.sampled_from([0.0, 0.12, 0.4, 1.0])


def overlap(span, others):
    """Return for how long `span` ran beside any of `others`."""
    found, until = 0.0, span[0]
    for start, end in sorted(others):
        found += max(0.0, min(span[1], end) - max(until, start))
        until = max(until, end)
    return found


@settings(deadline=None)
@given(
    tasks=task_lists(),
    contention=SHARES,
    overlap_slowdown=SHARES,
    near=SHARES,
    priority=st.sampled_from(list(Priority)),
)
def test_a_timeline_keeps_needs_and_streams_and_conserves_work(
    tasks, contention, overlap_slowdown, near, priority
):
    """The oracle is the definition: rates summed over a task's span are its work."""
    timeline = run_tasks(tasks, contention, overlap_slowdown, priority, node_slowdown=near)
    spans = {span.name: (span.start_us, span.end_us) for span in timeline.spans}
    assert len(spans) == len(tasks)
    slowdowns = {COMPUTE: contention, LINK: overlap_slowdown, NODE_LINK: near}
    for number, task in enumerate(tasks):
        start, end = spans[str(number)]
        assert all(spans[str(needed)][1] <= start for needed in task.needs)
        of_compute = task.stream == COMPUTE
        others = [
            (s.start_us, s.end_us) for s in timeline.spans if (s.stream == COMPUTE) != of_compute
        ]
        beside, slowdown = overlap((start, end), others), slowdowns[task.stream]
        assert end - start - beside * slowdown / (1.0 + slowdown) == pytest.approx(task.us)
    for stream in STREAMS:
        ends = [(s.start_us, s.end_us) for s in timeline.spans if s.stream == stream]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
        alone = sum(t.us for t in tasks if t.stream == stream)
        assert alone <= timeline.busy_us(stream) * (1 + 1e-9) <= timeline.total_us * (1 + 2e-9)
    if not contention and not overlap_slowdown and not near:
        assert timeline.total_us <= run_in_order(tasks).total_us * (1 + 1e-9)


WORKS = st.lists(
    st.tuples(st.sampled_from([COMPUTE, "near", "far"]), st.sampled_from([0.0, 0.5, 3.0]) | TIMES),
    min_size=1,
    max_size=12,
)


def in_turn(streams, works):
    """Give all at time 0; return the tasks."""
    return [streams.serve(stream, 0.0, work) for stream, work in works]


@given(works=WORKS, contention=SHARES, near=SHARES, far=SHARES)
def test_slowdowns_put_off_every_end_and_with_none_an_end_is_start_plus_work(
    works, contention, near, far
):
    plain, slowed = Streams(), Streams(COMPUTE, contention, {"near": near, "far": far})
    free = {}
    for (stream, work), before, after in zip(
        works, in_turn(plain, works), in_turn(slowed, works), strict=True
    ):
        free[stream] = free.get(stream, 0.0) + work
        assert plain.end_of(before) == before.end == free[stream]
        assert slowed.end_of(after) >= free[stream] * (1 - 1e-9)
        if not contention and not near and not far:
            assert slowed.end_of(after) == free[stream]
    assert slowed.idle_at() >= plain.idle_at() * (1 - 1e-9)
    if COMPUTE not in free or len(free) == 1:
        assert slowed.idle_at() == pytest.approx(plain.idle_at())


@given(works=WORKS, contention=SHARES, slowdown=SHARES, later=st.floats(0.0, 20.0))
def test_tasks_given_later_move_no_end_that_is_past_and_none_forward(
    works, contention, slowdown, later
):
    streams = Streams(COMPUTE, contention, {"near": slowdown, "far": 0.0})
    tasks = in_turn(streams, works)
    before = [streams.end_of(task) for task in tasks]
    for stream in (COMPUTE, "near", "far"):
        streams.serve(stream, later, 5.0)
    for task, end in zip(tasks, before, strict=True):
        now = streams.end_of(task)
        assert now >= end - 1e-9
        if end <= later:
            assert now == end == task.end


def test_without_slowdowns_an_end_is_start_plus_work_to_the_last_bit():
    streams = Streams()
    first = streams.serve("link", 0.1, 0.2)
    assert first.end == streams.end_of(first) == 0.1 + 0.2
    assert streams.serve("link", 0.0, 0.7).end == (0.1 + 0.2) + 0.7
    assert streams.idle_at() == (0.1 + 0.2) + 0.7


def test_both_slow_each_other_until_the_first_of_them_is_over():
    """By 9 the kernel of 6 is done at 2/3 of its rate, and 4.5 of 7 are sent at half; then 2.5."""
    streams = Streams("compute", 0.5, {"link": 1.0})
    kernel = streams.serve("compute", 0.0, 6.0)
    sent = streams.serve("link", 0.0, 7.0)
    queued = streams.serve("link", 0.0, 1.0)
    assert streams.end_of(kernel) == pytest.approx(9.0)
    assert streams.end_of(sent) == pytest.approx(9.0 + 2.5)
    assert streams.end_of(queued) == pytest.approx(9.0 + 2.5 + 1.0)
    assert streams.idle_at() == streams.end_of(queued)


def test_tasks_run_by_the_same_clock():
    """A kernel of 10 beside 6 sent at 1/1.5 of the rate: over at 9; what needs it, 5 more, alone
    from 10 on."""
    tasks = TaskList()
    tasks.add("beside", 10.0)
    sent = tasks.add("sent", 6.0, stream=LINK)
    tasks.add("last", 5.0, [sent])
    timeline = run_tasks(tasks.tasks, 0.0, 0.5)
    assert {s.name: (s.start_us, s.end_us) for s in timeline.spans} == {
        "beside": (0.0, 10.0),
        "sent": (0.0, 9.0),
        "last": (10.0, 15.0),
    }


def test_the_task_with_the_longest_path_behind_it_goes_first():
    tasks = TaskList()
    tasks.add("filler", 5.0)
    first = tasks.add("first", 1.0)
    sent = tasks.add("sent", 5.0, [first], LINK)
    tasks.add("last", 1.0, [sent])
    timeline = run_tasks(tasks.tasks, 0.0, 0.0)
    assert [span.name for span in timeline.spans][:2] == ["first", "filler"]
    assert timeline.total_us == 7.0
    assert timeline.exposed_us == pytest.approx(0.0)


def test_what_the_next_collective_needs_goes_before_longer_paths():
    """Two chunks of a product and a copy: the first is sent while the second is made."""
    tasks = TaskList()
    products = [tasks.add(f"product {i}", 10.0) for i in range(2)]
    copies = [tasks.add(f"copy {i}", 1.0, [product]) for i, product in enumerate(products)]
    for i, copy in enumerate(copies):
        tasks.add(f"send {i}", 10.0, [copy], LINK)
    by_path = run_tasks(tasks.tasks, 0.0, 0.0)
    by_need = run_tasks(tasks.tasks, 0.0, 0.0, Priority.NEXT_COLLECTIVE)
    assert by_path.total_us == 10 + 10 + 1 + 10 + 10
    assert by_need.total_us == 10 + 1 + 10 + 1 + 10
