"""A step on the emulated device under torch's profiler, its trace told in charged time.

Contract
    The trace is that of a real run: its operators, launches, waits and graphs. Every event is moved
    to the charged time at which it happened: the clock notes, whenever it is read or moves, what
    the machine's clock says. In place of what gloo's threads note there is one event for each
    exchange, from when the emulated link begins it to when it ends it.
    The link's own books know nothing of the trace: an exchange is exposed from when it has begun
    and the program waits for it, until it ends.
    Times of results are microseconds.
"""

from __future__ import annotations

import bisect
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.link.cases import Case
from benchmarks.link.charged_step import EmulatedDevice, compile_for
from benchmarks.link.clocks import ChargedClock
from benchmarks.link.emulated_link import EmulatedLink, make_emulated_group
from benchmarks.link.link_model import LinkRate, Traffic
from benchmarks.link.post_board import PostBoard
from benchmarks.link.step import Stepper, largest
from benchmarks.link.subjects import OneLayer
from benchmarks.planner.stated_routing import state_routing
from moe_compile.check.matched_collectives import Window, match
from moe_compile.check.profiler_trace import BY_A_PROCESSOR, trace_of
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import HardwareProfile, load_profile
from moe_compile.runtime.launch_records import runs_noted

US: Final = 1e6
READ: Final = "the machine's clock"
READS: Final = 20
"""Events in which the machine's clock is read, to know it from the trace's."""


class MarkedClock(ChargedClock):
    """A charged clock that notes the machine's time whenever it is read or moves."""

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()
        self.marks: list[tuple[float, float]] = []
        """The machine's time and the charged one, microseconds."""

    def now(self) -> float:
        """Return the time."""
        self._mark()
        return super().now()

    def charge(self, seconds: float) -> None:
        """Let so much time pass."""
        super().charge(seconds)
        self._mark()

    def wait_until(self, moment: float) -> None:
        """Move on to `moment`."""
        self._mark()
        super().wait_until(moment)
        self._mark()

    def _mark(self) -> None:
        self.marks.append((time.time_ns() / 1e3, self._now * US))

    def charged_us(self, wall_us: float) -> float:
        """Return the charged time of a time of the machine, between marks in proportion."""
        at = bisect.bisect_right(self.marks, (wall_us, float("inf")))
        if at == 0 or at == len(self.marks):
            return self.marks[min(at, len(self.marks) - 1)][1]
        (before, begin), (after, end) = self.marks[at - 1], self.marks[at]
        return begin + (end - begin) * (wall_us - before) / max(after - before, 1e-9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Booked:
    """One exchange by the link's own books."""

    begin: float
    end: float
    hidden_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """A step of one rank, by its trace and by the link's books."""

    window: Window
    booked: list[Booked]


@dataclass(frozen=True, slots=True)
class _Rank:
    link: EmulatedLink
    clock: MarkedClock
    hardware: HardwareProfile

    def trace(self, stepper: Stepper, forward: Any, rate: LinkRate, path: Path) -> Traced:
        """Run one step over a link of `rate`, profiled into the file `path`."""
        wire = self.link.wire
        stepper.timed(forward, rate)
        wire.events, wire.traffic = [], Traffic()
        self.clock.align(largest(self.clock.now()))
        self.clock.marks.clear()
        profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        with runs_noted() as records, profiler:
            read_us = [_read_clock() for _ in range(READS)]
            stepper.run(forward)
        booked = list(_books(wire.events, wire.traffic, rate))
        wire.events = None
        profiler.export_chrome_trace(str(path))
        data = json.loads(path.read_text())
        data["traceEvents"] = list(_in_charged_time(data, self.clock, booked, read_us))
        window = match(trace_of(data), records, lambda _: self.hardware.link_of(self.link.size()))
        return Traced(window=window, booked=booked)


def _books(events: Sequence[Any], traffic: Traffic, rate: LinkRate) -> Iterator[Booked]:
    """Yield what the link knows of each exchange, in the order of their launches."""
    times: dict[str, dict[int, float]] = {"launch": {}, "wait": {}, "end": {}}
    for event in events:
        times.get(event.kind, {}).setdefault(event.ordinal, event.time_s)
    for ordinal, crossing in zip(sorted(times["launch"]), traffic.crossings, strict=True):
        end = times["end"][ordinal]
        begin = end - rate.duration_s(crossing.between or 0.0)
        exposed = max(0.0, end - max(begin, times["wait"][ordinal]))
        yield Booked(begin=begin * US, end=end * US, hidden_us=(end - begin - exposed) * US)


def _read_clock() -> float:
    """Return the machine's time, read within an event of the trace."""
    with record_function(READ):
        return time.time_ns() / 1e3


def _offset_us(events: Sequence[Mapping[str, Any]], read_us: Sequence[float]) -> float:
    """Return what a trace's times lack of the machine's: by the reading that took least."""
    reads = sorted((e for e in events if e.get("name") == READ), key=lambda e: e["ts"])
    pairs = zip(reads, read_us, strict=True)
    event, read = min(pairs, key=lambda pair: pair[0]["dur"])
    return float(read - event["ts"] - event["dur"] / 2)


def _in_charged_time(
    data: Mapping[str, Any], clock: MarkedClock, booked: Sequence[Booked], read_us: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Yield a trace's events in charged time, its exchanges those of the emulated link."""
    events = [e for e in data["traceEvents"] if e.get("ph") == "X"]
    offset = _offset_us(events, read_us)
    gloo = {"ph": "X", "cat": "user_annotation", "name": "gloo:all_to_all", "tid": -1}
    for one in booked:
        yield {**gloo, "ts": one.begin + ROUNDING_US, "dur": one.end - one.begin - ROUNDING_US}
    for event in events:
        if not BY_A_PROCESSOR.match(str(event["name"])) and event["name"] != READ:
            begin = offset + event["ts"]
            begin, end = map(clock.charged_us, (begin, begin + event.get("dur", 0.0)))
            yield {**event, "ts": begin, "dur": end - begin}


ROUNDING_US: Final = 1e-3
"""By which an exchange that begins as it is posted is later than its post, whatever rounds."""


def trace_steps(
    rank: int, case: Case, rates: Sequence[LinkRate], num_chunks: int, folder: Path
) -> list[Traced]:
    """Return, for each rate of the link, a step of a layer in chunks, scheduled for one profile."""
    torch.set_num_threads(1)
    torch._dynamo.config.capture_scalar_outputs = True
    hardware, clock = load_profile("cpu"), MarkedClock()
    link = make_emulated_group(PostBoard(folder / "posts", rank, case.num_ranks), clock)
    subject = OneLayer(case, link).of(None)
    state_routing(subject, case, [1.0] * case.experts)  # as the profile's times take it to be
    stepper = Stepper(subject, link, clock)
    config = MegaMoEConfig(equal_tokens=True, strict=True, chunks=num_chunks)
    device = EmulatedDevice(config=config, clock=clock, hardware=hardware)
    forward = compile_for(stepper.module, device)
    here = _Rank(link, clock, hardware)
    return [
        here.trace(stepper, forward, rate, folder / f"trace_{rank}_{number}.json")
        for number, rate in enumerate(rates)
    ]
