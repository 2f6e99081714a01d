"""The collectives of a rank's trace, each beside what was predicted for it.

Contract
    A run of a compiled graph begins in the trace with the graph's own call, and the process knows
    in which order its graphs ran. The launches that follow are the graph's, one by one: their
    operators are compared. A run whose launches are others is left out, and said.
    Predicted are times of the graph's schedule (`schedule/timeline.py`); a graph that was not
    scheduled has none.
    Times are microseconds. Results are plain data, for another process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from moe_compile.check.profiler_trace import (
    Collective,
    Launch,
    ProfilerTrace,
    common,
    length,
    without,
)
from moe_compile.hardware.links import Link
from moe_compile.report.timelines import Run
from moe_compile.schedule.timeline import kept_timeline
from moe_compile.schedule.timeline_data import AFTER, ON_COMPUTE, ON_LINK, unpacked

NAMESPACE: Final = "_c10d_functional::"
Key = tuple[str, int]
"""Of a collective: its graph, and its number among the graph's launches, from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One collective of a graph, as the report has it."""

    operator: str
    group: str
    link: str
    """The name of its link, alike on ranks of other groups."""
    where: str
    latency_us: float
    """The part of its predicted time that does not grow with its bytes."""
    gb_per_s: float
    """The profile's rate of the link."""
    total_us: float | None
    """None where nothing was predicted."""
    hidden_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One run of a collective."""

    group: str
    number: int
    """Among the group's collectives of the window: the same on all ranks of the group."""
    total_us: float
    hidden_us: float
    late_us: float
    """How long the host, or the group's thread, kept it or the compute beside it waiting."""

    @property
    def exposed_us(self) -> float:
        """Return the part of its time beside which the device did not compute."""
        return self.total_us - self.hidden_us


@dataclass(kw_only=True, slots=True)
class Window:
    """What a rank saw of some steps."""

    planned: dict[Key, Planned] = field(default_factory=dict)
    seen: dict[Key, list[Seen]] = field(default_factory=dict)
    compute_us: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Graph -> compute between its first collective and its last: measured, and predicted."""
    faults: list[str] = field(default_factory=list)


def match(
    trace: ProfilerTrace,
    records: Sequence[Mapping[str, Any]],
    link_of: Callable[[str], Link],
) -> Window:
    """Return the collectives of graphs that ran in the order of `records`.

    `link_of` gives the profile's link of a group by the group's name.
    """
    window = Window()
    if len(trace.graphs) != len(records):
        window.faults.append(
            f"the trace has {len(trace.graphs)} runs of compiled graphs with collectives, but "
            f"{len(records)} such graphs ran, so collectives cannot be matched"
        )
        return window
    titles = _titles(records)
    plans = {title: _Plan.of(record, link_of) for title, record in titles.items()}
    title_of = {id(record): title for title, record in titles.items()}
    ran = {id(c.launch): c for c in trace.collectives if c.launch is not None}
    begins, numbers = [launch.begin for launch in trace.launches], dict[str, int]()
    ends = [*trace.graphs[1:], float("inf")]
    for record, begin, end in zip(records, trace.graphs, ends, strict=True):
        title = title_of[id(record)]
        plan = plans[title]
        places = _next_numbers(plan, numbers)
        first = bisect_left(begins, begin)
        launches = [x for x in trace.launches[first : first + len(plan.launches)] if x.begin < end]
        if fault := _fault(plan, launches):
            window.faults.append(f"{title}: {fault}")
            continue
        found = [ran.get(id(launch)) for launch in launches]
        if None in found:
            window.faults.append(
                f"{title}: {found.count(None)} launches were not found in the trace"
            )
        _add_run(window, title, plan, places, list(zip(launches, found, strict=True)), trace)
    window.faults = list(dict.fromkeys(window.faults))
    return window


def _next_numbers(plan: _Plan, numbers: dict[str, int]) -> list[int]:
    """Return the number of each launch of a run among those of its group, which `numbers` count.

    A run that is left out counts too: on other ranks it may not be.
    """
    places = []
    for one in plan.launches:
        numbers[one.group] = numbers.get(one.group, 0) + 1
        places.append(numbers[one.group])
    return places


def _titles(records: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return different records by a title each, in the order of their first runs."""
    found: dict[str, Mapping[str, Any]] = {}
    for record in {id(r): r for r in records}.values():
        title = f"{record['phase']} at {record['site']}"
        same = sum(t == title or t.startswith(f"{title} (") for t in found)
        found[f"{title} ({same + 1})" if same else title] = record
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The collectives of a graph in the order in which it launches them, and its compute."""

    launches: list[Planned]
    compute_us: float | None

    @staticmethod
    def of(record: Mapping[str, Any], link_of: Callable[[str], Link]) -> _Plan:
        text = kept_timeline(record.get("timeline", ""))
        data = unpacked(text) if text else {}
        run = data.get("runs", {}).get(AFTER)
        known = Run(name=AFTER, nodes=data["nodes"], **run) if run else None
        alone = known.alone_us() if known else {}
        places = {n[0]: n[2] for n in data.get("nodes", ())}
        links = {data["nodes"][x["node"]][0]: x["stream"] for x in data.get("launches", ())}
        ordered: dict[int, Planned] = {}
        for group, numbers in record["numbers"].items():
            link = link_of(group)
            for number, signature in zip(numbers, record["launches"][group], strict=True):
                name, _, rest = signature.partition(" = ")
                total, exposed = alone.get(name, (None, 0.0))
                ordered[number] = Planned(
                    operator=rest.partition("(")[0],
                    group=group,
                    link=links.get(name, "link").partition(" (")[0],
                    where=places.get(name, ""),
                    latency_us=min(link.latency_us, total or 0.0),
                    gb_per_s=link.exchange_gb_per_s,
                    total_us=total,
                    hidden_us=(total or 0.0) - exposed,
                )
        launches = [ordered[number] for number in sorted(ordered)]
        return _Plan(launches=launches, compute_us=_compute_between(known) if known else None)


def _compute_between(run: Run) -> float:
    """Return the predicted compute from the first collective's begin to the last one's end."""
    links = [(s[2], s[2] + s[3]) for s in run.spans if run.kind_of(s) == ON_LINK]
    if not links:
        return 0.0
    whole = (min(begin for begin, _ in links), max(end for _, end in links))
    return length(common([whole], sorted((s[2], s[2] + s[3]) for s in run.spans
                                         if s[1] == ON_COMPUTE)))  # fmt: skip


def _fault(plan: _Plan, launches: Sequence[Launch]) -> str:
    """Return in what the launches of a run are not those of its graph, "" where they are."""
    theirs = [plain(launch.operator) for launch in launches]
    ours = [plain(one.operator) for one in plan.launches]
    if theirs == ours:
        return ""
    number = next((i for i, pair in enumerate(zip(theirs, ours, strict=False)) if len({*pair}) > 1),
                  len(theirs))  # fmt: skip
    there = theirs[number] if number < len(theirs) else "nothing"
    return (
        f"the report has {len(ours)} launches, the trace of this run {len(theirs)}; launch "
        f"{number + 1} is {ours[number]} in the report but {there} in the trace, so they are not "
        "compared"
    )


def plain(operator: str) -> str:
    """Return a collective's name, for the variants that generated code calls too."""
    return operator.removeprefix(NAMESPACE).removesuffix("_out").rstrip("_")


def _add_run(
    window: Window,
    title: str,
    plan: _Plan,
    places: Sequence[int],
    found: Sequence[tuple[Launch, Collective | None]],
    trace: ProfilerTrace,
) -> None:
    """Add one run of a graph, its collectives numbered in their groups by `places`."""
    free: dict[str, float] = {}
    for number, (planned, (launch, one)) in enumerate(zip(plan.launches, found, strict=True), 1):
        if one is None:
            continue
        group = planned.group
        if trace.is_gpu:
            late_us = _host_was_late(one, trace)
        else:
            late_us = max(0.0, one.begin - max(launch.begin, free.get(group, launch.begin)))
        free[group] = max(one.end, free.get(group, one.end))
        window.planned.setdefault((title, number), planned)
        window.seen.setdefault((title, number), []).append(
            Seen(
                group=group,
                number=places[number - 1],
                total_us=one.end - one.begin,
                hidden_us=trace.hidden_us(one),
                late_us=late_us,
            )
        )
    spans = [(one.begin, one.end) for _, one in found if one is not None]
    if spans and plan.compute_us is not None and len(spans) == len(found):
        whole = [(min(spans)[0], max(end for _, end in spans))]
        before = window.compute_us.get(title, (0.0, 0.0))
        measured = length(common(whole, trace.busy_in(*whole[0])))
        window.compute_us[title] = (before[0] + measured, before[1] + plan.compute_us)


def _host_was_late(one: Collective, trace: ProfilerTrace) -> float:
    """Return how long a device without work waited beside a collective for the host to launch."""
    waited = 0.0
    for begin, end in without((one.begin, one.end), trace.busy_in(one.begin, one.end)):
        at = bisect_left(trace.work_begins, begin)
        if at < len(trace.works):
            waited += max(0.0, min(end, trace.works[at].called) - begin)
    return waited
