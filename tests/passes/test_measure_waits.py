"""Waits are measured under the names of their collectives, and change nothing."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch._inductor.utils import run_fw_bw_and_get_code
from torch._subclasses import FakeTensorMode

import moe_compile
from moe_compile.graph.query import is_wait
from moe_compile.journal.reasons import Reason
from moe_compile.runtime.launch_records import executed_records
from moe_compile.runtime.measured_waits import (
    MEASURED_WAIT,
    WAIT_TIMES,
    Waited,
    WaitTimes,
    parts_of,
)
from moe_compile.testing.mirrored_rank import MirroredGroup
from moe_compile.testing.process_groups import new_group_of
from passes.measure_waits import MeasureWaits
from tests.capture import state
from tests.device_programs import traced
from tests.layers import GroupedExperts
from tests.scheduled_layers import c10d, one_rank_group

LATE_S = 0.08
NUM_FORWARD = 5
"""Collectives of the forward graph of a layer in two chunks: counts, two out, two back."""


class HandClock:
    """Moves only when told."""

    time_s = 0.0

    def now(self):
        return self.time_s


class Late(dist.Work):
    """An exchange that ends at a stated time."""

    def __init__(self, clock, end_s):
        super().__init__()
        self.clock, self.end_s = clock, end_s

    def wait(self, timeout=None):
        self.clock.time_s = max(self.clock.time_s, self.end_s)
        return True


class LateGroup(MirroredGroup):
    """A rank alone, of whose exchanges one takes long."""

    backend_name = "late"
    late = -1
    """Number of that exchange."""
    launched = 0
    clock = HandClock()

    @torch.compiler.disable
    def alltoall_base(self, *args):
        super().alltoall_base(*args)
        is_late = self.launched == self.late
        self.launched += 1
        return Late(self.clock, self.clock.now() + LATE_S * is_late)

    def begin(self, late):
        self.launched, self.late = 0, late


@pytest.fixture(scope="module")
def late_group():
    one_rank_group()
    return new_group_of(LateGroup, lambda *_: LateGroup(1), ["cpu"])


@pytest.fixture(autouse=True)
def nothing_measured_before(monkeypatch):
    monkeypatch.setattr(WAIT_TIMES, "clock", LateGroup.clock.now)
    WAIT_TIMES.take()


def compiled(group, **options):
    torch._dynamo.reset()
    torch.manual_seed(3)
    layer = GroupedExperts(16, 24, 4, 2, group)
    settings = {"chunks": 2, "hardware": "cpu", "measure_waits": True, **options}
    options = {f"megamoe.{name}": value for name, value in settings.items()}
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(layer, backend="megamoe", fullgraph=True, options=options), layer, x


def step(program, layer, x):
    y = program(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("codegen", ["fx", "inductor"])
def test_the_wait_for_a_late_exchange_is_long_under_its_name(late_group, codegen):
    late_group.begin(late=-1)
    program, layer, x = compiled(late_group, codegen=codegen)
    step(program, layer, x)
    *_, forward, backward = executed_records()
    order = {
        record["phase"]: [launch.partition(" = ")[0] for launch in launches]
        for record in (forward, backward)
        for launches in record["launches"].values()
    }
    assert len(order["forward"]) == NUM_FORWARD
    for late, phase in ((1, "forward"), (NUM_FORWARD + 2, "backward")):
        moe_compile.measured_waits()
        late_group.begin(late)
        step(program, layer, x)
        longest, *others = moe_compile.measured_waits()
        names = [(forward["site"], one, node) for one in order for node in order[one]]
        assert sorted(wait.name for wait in (longest, *others)) == sorted(names)
        assert longest.name == (forward["site"], phase, order[phase][late % NUM_FORWARD])
        assert longest.measured_ms == pytest.approx(1e3 * LATE_S)
        assert {wait.measured_ms for wait in others} == {0.0}
        assert {wait.per_step for wait in (longest, *others)} == {1.0}
        assert all(wait.predicted_ms >= 0.0 for wait in (longest, *others))


@pytest.mark.parametrize("codegen", ["fx", "inductor"])
def test_no_bit_changes(late_group, codegen):
    late_group.begin(late=-1)
    plain, ours = (
        step(*compiled(late_group, codegen=codegen, measure_waits=measures))
        for measures in (False, True)
    )
    assert WAIT_TIMES.take()
    assert all(map(torch.equal, plain, ours))


def test_the_code_differs_by_the_operator_that_waits_alone(late_group):
    """Order, buffers and their reuse are those of torch's waits."""

    def code(*, measures):
        program, _, x = compiled(late_group, measure_waits=measures)
        with torch._inductor.config.patch(fx_graph_cache=False):
            _, codes = run_fw_bw_and_get_code(lambda: program(x))
        lines = [line for code in codes for line in code.splitlines()]
        return [line for line in lines if not line.lstrip().startswith("#")]

    plain, ours = code(measures=False), code(measures=True)
    measured = re.compile(r"megamoe\.measured_wait\.default\((.*), '[^']*'\)")
    assert len(list(filter(measured.search, ours))) == 2 * NUM_FORWARD - 1
    as_torch = [measured.sub(r"_c10d_functional.wait_tensor.default(\1)", line) for line in ours]
    assert as_torch == plain


def graph_of(program, *inputs, **options):
    gm = traced(program, *inputs)
    report = MeasureWaits().run(gm.graph, state(**options))
    gm.graph.lint()
    gm.recompile()
    return gm, report


def twice(x):
    launch = c10d.all_reduce(x, "sum", one_rank_group())
    return c10d.wait_tensor(c10d.wait_tensor(launch)) + x


def test_of_two_waits_for_one_collective_the_first_is_measured():
    x = torch.ones(3)
    gm, report = graph_of(twice, x, measure_waits=True, codegen="fx")
    assert torch.equal(gm(x), torch.full((3,), 2.0))
    assert list(report.applied) == ["all_reduce"]
    assert {parts_of(name)[2]: w.runs for name, w in WAIT_TIMES.take().items()} == {"all_reduce": 1}
    waits = [node.target for node in filter(is_wait, gm.graph.nodes)]
    assert waits == [MEASURED_WAIT, c10d.wait_tensor.default]


def test_waits_are_torchs_where_it_is_not_asked_for_or_the_wrapper_is_c():
    _, report = graph_of(twice, torch.ones(3))
    assert not report.applied and not report.skipped
    with torch._inductor.config.patch(cpp_wrapper=True):
        _, report = graph_of(twice, torch.ones(3), measure_waits=True)
    assert [left.reason for left in report.skipped] == [Reason.NO_MEANS]
    assert not report.applied


def test_nothing_is_measured_while_it_is_off():
    times = WaitTimes()
    times.is_on = False
    assert torch.equal(times.wait(torch.ones(2), "site|forward|launch"), torch.ones(2))
    assert times.take() == {}


class Event:
    """An event of a device that has passed those recorded `until` now."""

    clock = until = made = 0.0

    def __init__(self, enable_timing):
        assert enable_timing
        Event.made += 1

    def record(self):
        Event.clock += 2.0
        self.ms = Event.clock

    def query(self):
        return self.ms <= Event.until

    def elapsed_time(self, after):
        return after.ms - self.ms


def test_on_a_gpu_events_are_read_once_the_device_has_passed_them_and_used_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    times = WaitTimes()
    with FakeTensorMode():
        tensor = torch.empty(2, device="cuda")
    for _ in range(2):
        times.wait(tensor, "a|forward|launch")
    assert times.take() == {}
    Event.until = 4.0  # the second wait's events are not passed
    assert times.take() == {"a|forward|launch": Waited(seconds=0.002, runs=1)}
    times.wait(tensor, "b|forward|launch")
    assert Event.made == 4
    Event.until = Event.clock
    assert {name: waited.runs for name, waited in times.take().items()} == {
        "a|forward|launch": 1,
        "b|forward|launch": 1,
    }
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    times.wait(tensor, "a|forward|launch")
    Event.until = Event.clock
    assert times.take() == {}


@pytest.mark.gpu
def test_a_stream_that_stands_is_seen_and_the_host_is_not_held_up():
    """The link is another stream, whose end the group's work has the current stream wait for."""

    class OnStream(dist.Work):
        def wait(self, timeout=None):
            torch.cuda.current_stream().wait_event(self.end)
            return True

    times, tensor, work = WaitTimes(), torch.ones(2, device="cuda"), OnStream()
    link, work.end = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(link):
        torch.cuda._sleep(200_000_000)  # cycles, some 100 ms
        work.end.record()
    torch._C._distributed_c10d._register_work(tensor, work)
    began = time.perf_counter()
    times.wait(tensor, "site|forward|launch")
    assert time.perf_counter() - began < 0.03
    assert times.take() == {}
    torch.cuda.synchronize()
    (waited,) = times.take().values()
    assert 0.03 < waited.seconds < 1.0
