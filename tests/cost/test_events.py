"""Streams serve one task at a time, and contention stretches exactly what overlaps."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compile.cost.events import Streams
from moe_compile.cost.tasks import (
    COMPUTE,
    LINK,
    Priority,
    TaskList,
    run_in_order,
    run_tasks,
)

TIMES = st.floats(0.1, 10.0)


@st.composite
def task_lists(draw):
    """Any DAG over two streams: every task needs some of those before it."""
    tasks = TaskList()
    for number in range(draw(st.integers(1, 12))):
        needs = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        stream = draw(st.sampled_from([COMPUTE, LINK]))
        tasks.add(str(number), draw(TIMES), sorted(needs), stream)
    return tasks.tasks


@settings(deadline=None)
@given(
    tasks=task_lists(),
    contention=st.sampled_from([0.0, 0.12, 1.0]),
    priority=st.sampled_from(list(Priority)),
)
def test_a_timeline_keeps_needs_and_streams_and_slows_what_overlaps(tasks, contention, priority):
    """The oracle is the definition: a task's work is its span less the share contention took."""
    timeline = run_tasks(tasks, contention, priority)
    spans = {span.name: span for span in timeline.spans}
    assert len(spans) == len(tasks)
    links = [span for span in timeline.spans if span.stream == LINK]
    for number, task in enumerate(tasks):
        span = spans[str(number)]
        for needed in task.needs:
            assert spans[str(needed)].end_us <= span.start_us
        others = [s for s in links if s is not span] if task.stream == COMPUTE else []
        beside = sum(
            max(0.0, min(span.end_us, s.end_us) - max(span.start_us, s.start_us)) for s in others
        )
        work = span.end_us - span.start_us - beside * contention / (1.0 + contention)
        assert work == pytest.approx(task.us)
    for stream in (COMPUTE, LINK):
        ends = [(s.start_us, s.end_us) for s in timeline.spans if s.stream == stream]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    assert max(t.us for t in tasks) <= timeline.total_us * (1 + 1e-9)
    if not contention:
        assert timeline.total_us <= run_in_order(tasks).total_us * (1 + 1e-9)


def test_without_contention_an_end_is_start_plus_work_to_the_last_bit():
    streams = Streams()
    first = streams.serve("link", 0.1, 0.2)
    assert first.end == 0.1 + 0.2
    assert streams.serve("link", 0.0, 0.7).end == (0.1 + 0.2) + 0.7
    assert streams.free_at("other") == 0.0


def test_a_collective_that_starts_under_a_kernel_moves_its_end():
    """Ten units of work, a collective of four from the third on: 4 at half speed."""
    streams = Streams(slowed="compute", slowdown=1.0)
    kernel = streams.serve("compute", 0.0, 10.0)
    assert kernel.end == 10.0
    streams.serve("link", 3.0, 4.0)
    assert kernel.end == 12.0


def test_the_task_with_the_longest_path_behind_it_goes_first():
    tasks = TaskList()
    tasks.add("filler", 5.0)
    first = tasks.add("first", 1.0)
    sent = tasks.add("sent", 5.0, [first], LINK)
    tasks.add("last", 1.0, [sent])
    timeline = run_tasks(tasks.tasks, 0.0)
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
    by_path = run_tasks(tasks.tasks, 0.0)
    by_need = run_tasks(tasks.tasks, 0.0, Priority.NEXT_COLLECTIVE)
    assert by_path.total_us == 10 + 10 + 1 + 10 + 10
    assert by_need.total_us == 10 + 1 + 10 + 1 + 10
