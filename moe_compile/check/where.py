"""Section `where`: each collective of a job as it ran, beside what the report predicts of it.

Contract
    The form is megamoe as the job asks. Some of its steps run under torch's profiler on every rank,
    after steps that compile and steps without the profiler: what it adds is told.
    Compute beside collectives is compared with equal compute alone, of the same steps and of those
    without the schedule, which overlap less. Pieces of work are equal by name and sizes. A piece
    counts as beside where a collective ran for most of its time, as alone where none ran at all;
    others count as neither. Several windows may be added: those of a form that overlaps little have
    more pieces alone.
    Traces stay beside the results. A trace in which no collective of the report is found fails;
    one in which some are not found is a warning. No difference from a prediction fails.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from moe_compile.check.explained_errors import compute_of, constants_of, fits_of, rows_of
from moe_compile.check.forms import AS_ASKED, WITHOUT, Form
from moe_compile.check.matched_collectives import Window, match
from moe_compile.check.paired import estimate
from moe_compile.check.profiler_trace import (
    ProfilerTrace,
    common,
    length,
    measure,
    read_trace,
    union,
)
from moe_compile.check.sections import Record, say
from moe_compile.check.steps import Steps
from moe_compile.check.team import Team
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import load_profile
from moe_compile.hardware.links import Link
from moe_compile.hardware.measure import elapsed_s, synchronize
from moe_compile.report.explanation_text import why_nothing_was_rewritten
from moe_compile.runtime.launch_records import runs_noted

STEPS: Final = 3
"""Steps that are profiled, and as many before them that are not."""
COMPILING: Final = 2
UNSCHEDULED: Final = WITHOUT["megamoe without schedule"]
LEAST_PIECES: Final = 8
"""Pieces of compute from which on contention is told."""
ON_PROCESSORS: Final = (
    "these are times on CPUs. gloo runs collectives on threads that need the same cores as "
    "compute, so a collective begins only when its thread gets a core. Inductor's code counts as "
    "time in which the host does not wait. In waits of FSDP, the host counts as waiting while it "
    "runs no operator"
)
ON_GPUS: Final = (
    "a collective's kernel starts when its own rank comes to the collective, so its time includes "
    "waiting for other ranks"
)
MOSTLY: Final = 0.5
"""Share of its time from which on a piece ran beside a collective."""


@dataclass(kw_only=True, slots=True)
class Pieces:
    """How long pieces of compute took, in microseconds, by name and sizes."""

    beside: dict[str, list[float]] = field(default_factory=dict)
    alone: dict[str, list[float]] = field(default_factory=dict)

    def add(self, trace: ProfilerTrace, *, only_alone: bool = False) -> None:
        """Add the compute of a trace, or only what ran alone there."""
        for key, took, shared_us in _shared(trace):
            if shared_us == 0.0:
                self.alone.setdefault(key, []).append(took)
            elif shared_us >= MOSTLY * took and not only_alone:
                self.beside.setdefault(key, []).append(took)

    def ratios(self) -> list[float]:
        """Return, of each piece beside a collective, its time over that of an equal one alone."""
        typical = {
            key: statistics.median(self.alone[key]) for key in {*self.beside} & {*self.alone}
        }
        return [took / us for key, us in typical.items() if us > 0 for took in self.beside[key]]


def _shared(trace: ProfilerTrace) -> Iterator[tuple[str, float, float]]:
    """Yield of each piece its key, its time, and how long of that a collective ran."""
    spans = list(union((c.begin, c.end) for c in trace.collectives))
    begins = [begin for begin, _ in spans]
    for work in trace.works:
        near = spans[max(0, bisect_left(begins, work.begin) - 1) : bisect_left(begins, work.end)]
        yield work.key, work.end - work.begin, length(common([(work.begin, work.end)], near))


@dataclass(kw_only=True, slots=True)
class Found:
    """What one rank saw of one form."""

    window: Window
    totals: dict[str, float]
    """Hidden and exposed milliseconds of a step, of all collectives, torch's own too."""
    step_s: float
    profiled_step_s: float
    nothing: str
    """Why nothing was rewritten, "" where something was."""
    ratios: list[float] = field(default_factory=list)
    """Times of compute beside collectives over that of equal compute alone."""


class Where:
    """The section's work on this rank."""

    def __init__(self, job: Steps, config: MegaMoEConfig, out: Path) -> None:
        """Profile steps of `job`, whose options are `config`; traces go to `out`."""
        self._job, self._out = job, out
        self._hardware = load_profile(config.hardware)
        self._pieces = Pieces()

    def as_asked(self) -> Found:
        """Profile the job as it asks."""
        trace, found = self._profiled(AS_ASKED)
        self._pieces.add(trace)
        return found

    def without_overlap(self) -> list[float]:
        """Profile the job without its schedule; return the ratios of what ran beside and alone."""
        trace, _ = self._profiled(UNSCHEDULED)
        self._pieces.add(trace, only_alone=True)
        return self._pieces.ratios()

    def ratios(self) -> list[float]:
        """Return the ratios known so far."""
        return self._pieces.ratios()

    def _profiled(self, form: Form) -> tuple[ProfilerTrace, Found]:
        job, device = self._job, self._job.device.type
        path = (
            self._out / f"where_{form.name.replace(' ', '_')}_rank{dist.get_rank()}.trace.json.gz"
        )
        with job.forms.using(form):
            job.restore()
            for _ in range(COMPILING):
                job.step()
            job.restore()
            dist.barrier()
            plain = [elapsed_s(device, job.step) for _ in range(STEPS)]
            job.restore()
            dist.barrier()
            records, profiled = _profile(job, path)
        trace = read_trace(path)
        totals = {name: ms / STEPS for name, ms in measure(trace).items()}
        found = Found(
            window=match(trace, records, self._link_of),
            totals=totals,
            step_s=statistics.median(plain),
            profiled_step_s=statistics.median(profiled),
            nothing=why_nothing_was_rewritten(job.forms.report(form)),
        )
        return trace, found

    def _link_of(self, group: str) -> Link:
        """Return the profile's link of a process group by its name."""
        try:
            size = dist.distributed_c10d._resolve_process_group(group).size()
        except (RuntimeError, ValueError, KeyError):
            size = 0
        return self._hardware.link_of(size)


def _profile(job: Steps, path: Path) -> tuple[list[Mapping[str, Any]], list[float]]:
    """Write a trace of `STEPS` steps; return the records of graphs that ran in them, and times.

    One step before them warms the profiler up.
    """
    device = job.device.type
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] * (device == "cuda")

    def keep(profiler: profile) -> None:
        profiler.export_chrome_trace(str(path))

    def step() -> None:
        job.step()
        synchronize(device)

    profiler = profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=keep,
        record_shapes=device == "cpu",
    )
    with profiler:
        step()
        job.restore()
        dist.barrier()
        profiler.step()
        with runs_noted() as records:
            seconds = []
            for _ in range(STEPS):
                seconds.append(elapsed_s(device, step))
                profiler.step()
    return records, seconds


def judge_window(device: str, record: Record, found: list[Found]) -> None:
    """Record a row of each collective; none at all fails."""
    is_rewritten = not all(one.nothing for one in found)
    why = f"megamoe rewrote nothing, so there is nothing to measure: {found[0].nothing}"
    record.expect(is_rewritten, AS_ASKED.name, why)
    windows = [one.window for one in found]
    faults = dict.fromkeys(
        f"rank {rank}: {fault}" for rank, w in enumerate(windows) for fault in w.faults
    )
    rows = list(rows_of(windows))
    if is_rewritten:
        why = next(iter(faults), "the traces have no collective of a compiled graph")
        record.expect(bool(rows), AS_ASKED.name, why)
    for row in rows:
        record.add_row(row)
    worst = max(found, key=lambda one: one.totals.get("exposed_ms", 0.0))
    record.put(
        warnings=[*faults],
        links=constants_of(fits_of(windows)),
        compute=compute_of(windows),
        all_collectives=worst.totals,
        step_ms=1e3 * max(one.step_s for one in found),
        profiled_step_ms=1e3 * max(one.profiled_step_s for one in found),
        limits=ON_GPUS if device == "cuda" else ON_PROCESSORS,
    )
    say(f"where: {len(rows)} collectives; totals of a step: {worst.totals or 'none'}")


def judge_contention(record: Record, found: list[list[float]]) -> None:
    """Record by how much compute is slower beside collectives, of all ranks."""
    ratios = [ratio for one in found for ratio in one]
    told = asdict(estimate(ratios)) if len(ratios) >= LEAST_PIECES else None
    record.put(contention=told, pieces=len(ratios))
    said = (
        f"{told['median']:.2f} times as long as alone"
        if told
        else "too few equal pieces to compare"
    )
    say(f"where: time of compute during collectives: {said}")


def check_where(team: Team, job: Steps, config: MegaMoEConfig, out: Path) -> None:
    """Run the section."""
    where = Where(job, config, out)
    team.run(AS_ASKED.name, where.as_asked, partial(judge_window, job.device.type))
    if config.schedule:
        team.run(UNSCHEDULED.name, where.without_overlap, judge_contention)
    else:
        team.run("contention", where.ratios, judge_contention)
