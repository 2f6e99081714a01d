"""What a trace of torch's profiler says of collectives: when each ran, and what ran beside it.

Contract
    Reads one rank's Chrome trace, of a GPU or of processors; times are microseconds of its clock.
    On a GPU a collective is a kernel, or a copy to another device, that a collective's operator
    launched, or that is called as kernels of NCCL and of NVSHMEM are. Compute is all other work
    of the device; copies to and from the host are neither.
    On a processor a collective is what a process group's own thread notes (`gloo:all_to_all`). The
    host is the device: it computes but where it waits for a collective.
    Hidden is the time of collectives while the device computes, exposed is the rest; several at
    once count once.
    A trace with work of a GPU says nothing of collectives of processors.
    Sets of points in time are intervals: their `union`, what two have in `common`, their `length`.
    Imports no torch: `python -m moe_compile.check.profiler_trace FILE` prints hidden and exposed.

What a trace of processors does not show
    When a thread of the process group was free: a collective begins as such a thread takes it up.
    Where torch itself waits (FSDP, the norm of gradients): there the host is taken to wait while it
    runs no operator and one of these collectives is under way.
    Code that Inductor generates: it is no operator; the host is known to be busy all the same.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

Event = Mapping[str, Any]

OF_A_COLLECTIVE: Final = re.compile(
    r"^nccl|^mscclpp|nvshmem|symmetric_memory|symm_mem"
    r"|(?:multimem|one_shot|two_shot)_(?:all_reduce|all_gather|reduce)"
)
"""Names of kernels that exchange: NCCL's (and RCCL's), NVSHMEM's, those of symmetric memory."""
BETWEEN_DEVICES: Final = re.compile(r"^Memcpy PtoP")
WITH_THE_HOST: Final = re.compile(r"^Memcpy (?:HtoD|DtoH|HtoH)")
DEVICE_WORK: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
CALLS: Final = frozenset({"cuda_runtime", "cuda_driver"})
BY_A_PROCESSOR: Final = re.compile(r"^(?:gloo|mpi|ucc):")
"""Names of what process groups of processors note on their threads."""
LAUNCH: Final = re.compile(r"^_c10d_functional::(?!wait_tensor|_wrap)")
WAIT: Final = re.compile(r"^_c10d_functional::wait_tensors?$")
POST: Final = re.compile(r"^c10d::")
"""Operators of process groups, which launches call, and torch's own code."""
CALL: Final = re.compile(f"{LAUNCH.pattern}|{POST.pattern}")
GRAPH: Final = "megamoe::record_launches"
"""What a compiled graph with collectives calls first (`runtime/launch_records.py`)."""
KINDS: Final = (
    "alltoall", "allgather", "reducescatter", "allreduce", "broadcast", "gather", "scatter",
    "reduce", "send", "recv", "barrier",
)  # fmt: skip
"""Kinds of collectives, as names have them, underscores left out; the first that fits counts."""
INSTEAD: Final = {"reducescatter": "allreduce"}
"""What gloo does in place of a kind."""
NEXT_FEW: Final = 8
"""Collectives that may be under way at once, of all groups, and begin in another order."""
Interval = tuple[float, float]
"""Begin and end."""


def union(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Yield disjoint intervals, ascending, that cover the same points."""
    current: Interval | None = None
    for begin, end in sorted(intervals):
        if current is None or begin > current[1]:
            if current is not None:
                yield current
            current = (begin, end)
        else:
            current = (current[0], max(current[1], end))
    if current is not None:
        yield current


def common(first: Sequence[Interval], second: Sequence[Interval]) -> Iterator[Interval]:
    """Yield the overlaps of two lists of disjoint ascending intervals."""
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            yield begin, end
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1


def without(whole: Interval, taken: Iterable[Interval]) -> Iterator[Interval]:
    """Yield what disjoint ascending intervals leave of `whole`."""
    begin, end = whole
    for first, last in taken:
        if last <= begin:
            continue
        if first >= end:
            break
        if first > begin:
            yield begin, first
        begin = max(begin, last)
    if begin < end:
        yield begin, end


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The call of a functional collective on the host."""

    operator: str
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective as it ran."""

    begin: float
    end: float
    launch: Launch | None
    """None where torch's own code launched it, or it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """An operator of a processor, or a kernel."""

    key: str
    """Its name and sizes: equal for equal work."""
    begin: float
    end: float
    called: float
    """When the host launched it."""


@dataclass(kw_only=True, slots=True)
class ProfilerTrace:
    """The collectives and the compute of one rank."""

    is_gpu: bool
    collectives: list[Collective]
    """By their begin."""
    launches: list[Launch]
    """Calls of functional collectives, in order, whether or not the collective was found."""
    busy: list[Interval]
    """When the device computed: disjoint, ascending."""
    waited: list[Interval]
    """When a host that is the device waited for collectives; empty on a GPU."""
    works: list[Work]
    """Compute by pieces, by their begin, as far as the trace shows them."""
    work_begins: list[float] = field(default_factory=list)
    """Their begins."""
    graphs: list[float] = field(default_factory=list)
    """When each run of a compiled graph with collectives began, on the host."""

    def hidden_us(self, one: Collective) -> float:
        """Return how long the device computed while the collective ran."""
        return length(common([(one.begin, one.end)], self.busy_in(one.begin, one.end)))

    def busy_in(self, begin: float, end: float) -> Sequence[Interval]:
        """Return the intervals of compute that reach into begin to end."""
        first = max(0, bisect_left(self.busy, (begin, begin)) - 1)
        return self.busy[first : bisect_left(self.busy, (end, end))]


def read_trace(path: Path) -> ProfilerTrace:
    """Read a trace that torch's profiler wrote, compressed where its name ends in `.gz`.

    Raises ValueError for a file that is no such trace.
    """
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    data = json.loads(text)
    if not isinstance(data, dict) or "traceEvents" not in data:
        raise ValueError(f"{path} must be a trace of torch's profiler, and is not")
    return trace_of(data)


def trace_of(data: Mapping[str, Any]) -> ProfilerTrace:
    """Return what a trace's data say."""
    events = [e for e in data["traceEvents"] if e.get("ph") == "X"]
    events.sort(key=lambda e: (_begin(e), -_end(e)))
    launches = [
        Launch(operator=str(e["name"]), begin=_begin(e), end=_end(e))
        for e in events
        if LAUNCH.match(str(e["name"]))
    ]
    kernels = [e for e in events if e.get("cat") in DEVICE_WORK]
    trace = _of_gpu(events, kernels, launches) if kernels else _of_processor(events, launches)
    trace.graphs = [_begin(e) for e in events if e["name"] == GRAPH]
    trace.work_begins = [work.begin for work in trace.works]
    return trace


def _begin(event: Event) -> float:
    return float(event["ts"])


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event.get("dur", 0.0))


def _span(event: Event) -> Interval:
    return _begin(event), _end(event)


def _sizes(event: Event, *names: str) -> str:
    args = event.get("args", {})
    return " ".join(str(args[name]) for name in names if name in args)


def _enclosing(launches: Sequence[Launch], begins: Sequence[float], time: float) -> Launch | None:
    """Return the launch during which `time` lies; calls of one rank follow one another."""
    at = bisect_right(begins, time) - 1
    return launches[at] if at >= 0 and time <= launches[at].end else None


def _of_gpu(
    events: Sequence[Event], kernels: Sequence[Event], launches: list[Launch]
) -> ProfilerTrace:
    called = {
        e["args"]["correlation"]: _begin(e)
        for e in events
        if e.get("cat") in CALLS and "correlation" in e.get("args", {})
    }
    begins = [launch.begin for launch in launches]
    collectives, works = [], []
    for kernel in kernels:
        name = str(kernel["name"])
        call = called.get(kernel.get("args", {}).get("correlation"))
        launch = None if call is None else _enclosing(launches, begins, call)
        begin, end = _span(kernel)
        if launch or OF_A_COLLECTIVE.search(name) or BETWEEN_DEVICES.match(name):
            collectives.append(Collective(begin=begin, end=end, launch=launch))
        elif not WITH_THE_HOST.match(name):
            key = f"{name} {_sizes(kernel, 'grid', 'block')}"
            called_at = begin if call is None else call
            works.append(Work(key=key, begin=begin, end=end, called=called_at))
    return ProfilerTrace(
        is_gpu=True,
        collectives=_joined(collectives),
        launches=launches,
        busy=list(union((w.begin, w.end) for w in works)),
        waited=[],
        works=works,
    )


def _joined(collectives: Iterable[Collective]) -> list[Collective]:
    """Return the collectives, the kernels of one launch as one."""
    found: list[Collective] = []
    by_launch: dict[int, int] = {}
    for one in collectives:
        at = by_launch.get(id(one.launch)) if one.launch is not None else None
        if at is None:
            by_launch[id(one.launch)] = len(found)
            found.append(one)
            continue
        known = found[at]
        found[at] = Collective(begin=known.begin, end=max(known.end, one.end), launch=known.launch)
    return found


def _of_processor(events: Sequence[Event], launches: list[Launch]) -> ProfilerTrace:
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    noted = [e for e in events if BY_A_PROCESSOR.match(str(e["name"]))]
    collectives = _posted(noted, operators, launches)
    threads = {e["tid"] for e in operators if CALL.match(str(e["name"]))}
    own = [e for e in operators if e["tid"] in threads]
    whole = (_begin(events[0]), max(map(_end, events))) if events else (0.0, 0.0)
    idle = list(without(whole, union(map(_span, own))))
    torchs = list(union((c.begin, c.end) for c in collectives if c.launch is None))
    said = (_span(e) for e in own if WAIT.match(str(e["name"])))
    waited = list(union([*said, *common(torchs, idle)]))
    return ProfilerTrace(
        is_gpu=False,
        collectives=collectives,
        launches=launches,
        busy=list(without(whole, waited)),
        waited=waited,
        works=list(_outermost(own)),
    )


def _posted(
    noted: Sequence[Event], operators: Sequence[Event], launches: Sequence[Launch]
) -> list[Collective]:
    """Return the collectives of processors, each with its launch.

    A group's threads take up what is posted in order: of each kind the first that began after a
    post is its own, and of the next few, which may be of another group, one of its size.
    """
    begins = [launch.begin for launch in launches]
    open_ones: dict[str, list[int]] = {}
    for number, event in enumerate(noted):
        open_ones.setdefault(kind_of(str(event["name"])), []).append(number)
    owner: dict[int, Launch | None] = {}
    for post in _posts(operators, launches, begins):
        kind = kind_of(str(post["name"]))
        left = open_ones.get(INSTEAD.get(kind, kind), [])
        while left and _begin(noted[left[0]]) < _begin(post):
            left.pop(0)  # posted before the trace began
        sizes = _sizes(post, "Input Dims")
        fits = [i for i in left[:NEXT_FEW] if (own := _input(noted[i])) and own in sizes]
        if chosen := (fits or left)[:1]:
            left.remove(chosen[0])
            owner[chosen[0]] = _enclosing(launches, begins, _begin(post))
    return [
        Collective(begin=_begin(e), end=_end(e), launch=owner.get(i)) for i, e in enumerate(noted)
    ]


def _posts(
    operators: Sequence[Event], launches: Sequence[Launch], begins: Sequence[float]
) -> Iterator[Event]:
    """Yield the calls that post a collective: those of groups, or a launch that shows none.

    A process group written in Python shows no operator of its own.
    """
    calls = [e for e in operators if POST.match(str(e["name"]))]
    showing = {id(_enclosing(launches, begins, _begin(call))) for call in calls}
    for event in operators:
        name = str(event["name"])
        shows_none = LAUNCH.match(name) and (
            id(_enclosing(launches, begins, _begin(event))) not in showing
        )
        if shows_none or POST.match(name):
            yield event


def _input(event: Event) -> str:
    dims = event.get("args", {}).get("Input Dims", [])
    return str(dims[0]) if dims else ""


def kind_of(name: str) -> str:
    """Return the kind of a collective by the name of its operator, "" for what is none."""
    plain = name.rpartition(":")[2].replace("_", "").lower()
    return next((kind for kind in KINDS if kind in plain), "")


def _outermost(operators: Iterable[Event]) -> Iterator[Work]:
    """Yield the operators that no other one called, but for those of collectives."""
    last: dict[Any, float] = {}
    for event in operators:
        begin, end = _span(event)
        name = str(event["name"])
        if begin < last.get(event["tid"], begin):
            continue
        last[event["tid"]] = end
        if name.startswith(("aten::", "megamoe::")) and name != GRAPH:
            key = f"{name} {_sizes(event, 'Input Dims')}"
            yield Work(key=key, begin=begin, end=end, called=begin)


def measure(trace: ProfilerTrace) -> dict[str, float]:
    """Return `hidden_ms` and `exposed_ms` of all collectives of a trace; {} where it has none."""
    spans = list(union((c.begin, c.end) for c in trace.collectives))
    if not spans:
        return {}
    total, hidden = length(spans), length(common(spans, trace.busy))
    return {"hidden_ms": hidden / 1e3, "exposed_ms": (total - hidden) / 1e3}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(read_trace(Path(sys.argv[1])))) + "\n")
