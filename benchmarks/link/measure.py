"""Measure one case on this rank: compile every variant, then run them in turn at every ratio.

Contract
    Every rank calls `measure_case` with the same job and makes the same steps.
    A variant that fails to compile, or computes something else than its reference (subjects.py), is
    left out of the rounds and its error told.
    Within a round every variant makes one step; the order rotates from round to round.

Pseudo-code
    compile the baseline, run it without a link -> compute time, bytes -> rates of the links
    compile the others, told the rate at the ratio the preset names
    rounds without a link; then rounds at each ratio
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch._dynamo
import torch.distributed as dist

from benchmarks.link.cases import (
    INSIDE_LATENCY_S,
    LATENCY_S,
    NO_LINK_RATIO,
    RATIOS,
    Case,
    NodesCase,
    Plan,
    Preset,
)
from benchmarks.link.clocks import CLOCKS
from benchmarks.link.compile_turns import CompileTurns
from benchmarks.link.emulated_link import make_emulated_groups
from benchmarks.link.link_model import NO_LINK, LinkRate, Topology
from benchmarks.link.machine import measure_profile, write_profile
from benchmarks.link.post_board import PostBoard
from benchmarks.link.step import Forward, Sample, Stepper, relative_error
from benchmarks.link.subjects import Values, subjects_of
from benchmarks.link.variants import Variant, named_variants
from moe_compile import register_node_groups
from moe_compile.errors import MegaMoEError
from moe_compile.testing.rank_pool import SLOWEST

WARM_UP: Final = 3
ESTIMATE_STEPS: Final = 10
"""Steps that estimate compute before the profile is written."""
MAX_GRAPHS: Final = 64
"""All variants share one `forward`; Dynamo would stop at 8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What all ranks are told."""

    case: Case
    preset: Preset
    clock: str
    folder: Path
    """Empty, of this run: board and turns."""
    cache: Path
    """Kept from run to run: compiled code, and megamoe's profile, which is part of its key."""

    @property
    def profile(self) -> Path:
        """Return where megamoe's hardware profile for this case lies."""
        return self.cache / f"{self.case.name}.toml"


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What one variant did."""

    compile_s: float = 0.0
    is_from_cache: bool = False
    error: str = ""
    relative_error: float = 0.0
    rivals: tuple[str, ...] = ()
    has_bits: bool | None = None
    """Whether it has the bits of its reference, as `Variant.keeps_bits` has it; None unasked."""
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    """By ratio, one per round."""


@dataclass(kw_only=True, slots=True)
class CaseResult:
    """What rank 0 returns; times are seconds."""

    compute_s: float
    rates: dict[str, LinkRate]
    comm_s: dict[str, float]
    wire_bytes: float
    num_exchanges: int
    profile: str
    outcomes: dict[str, Outcome]


def measure_case(rank: int, job: Job) -> CaseResult | None:
    """Run the job; None on all ranks but 0."""
    run = _Run(rank, job)
    run.start()
    baseline = job.preset.baseline
    run.compile((baseline,))
    if baseline not in run.ways:
        raise RuntimeError(f"{baseline} failed: {run.outcomes[baseline].error}")
    run.write_profile()
    run.compile([name for name in job.preset.variants if name != baseline])
    _pin(rank, job.case.num_ranks)
    run.rounds(NO_LINK_RATIO, NO_LINK, job.preset.control_rounds)
    result = run.settle()
    for ratio, rate in result.rates.items():
        run.rounds(ratio, rate, job.preset.rounds)
    return result if rank == 0 else None


@dataclass(frozen=True, slots=True)
class _Way:
    """One compiled variant, and the stepper of its module."""

    stepper: Stepper
    forward: Forward

    def timed(self, rate: LinkRate) -> Sample:
        return self.stepper.timed(self.forward, rate)


class _Run:
    def __init__(self, rank: int, job: Job) -> None:
        torch.set_num_threads(1)
        torch._dynamo.config.capture_scalar_outputs = True
        torch._dynamo.config.recompile_limit = MAX_GRAPHS
        self._rank, self._job = rank, job
        clock = CLOCKS[job.clock]()
        board = PostBoard(job.folder / "posts", rank, job.case.num_ranks)
        link, *of_nodes = make_emulated_groups(board, clock, _topology(job.case))
        if of_nodes:
            node = rank // _topology(job.case).num_local
            register_node_groups(link, *of_nodes, host=f"emulated node {node}")
        self._subjects = subjects_of(job.case, link)
        self._link, self._clock = link, clock
        self._steppers: dict[Plan | None, Stepper] = {}
        self._turns = CompileTurns(job.folder, job.cache, SLOWEST * job.preset.timeout_s)
        self.ways: dict[str, _Way] = {}
        self.outcomes: dict[str, Outcome] = {}

    def start(self) -> None:
        """Get the compiler going."""
        self._turns.start_compiler()

    def compile(self, names: Sequence[str]) -> None:
        for variant in named_variants(tuple(names)):
            self._say(f"compiling {variant.name}")
            outcome = self._attempt(variant)
            self.outcomes[variant.name] = outcome
            if outcome.error:
                self._say(f"{variant.name} failed: {outcome.error}")

    def _attempt(self, variant: Variant) -> Outcome:
        """Compile and check one variant; all ranks return the same verdict."""
        stepper = self._stepper(variant.plan)
        way = _Way(stepper, variant.build(stepper.module, self._job.profile))
        mine = Outcome(rivals=variant.rivals)
        try:
            mine.relative_error = relative_error(self._first(variant, way), stepper.expected)
            if variant.backend:
                mine.compile_s = self._turns.seconds
                mine.is_from_cache = self._turns.is_from_cache
            if variant.keeps_bits:
                plain = variant.build(stepper.module, self._job.profile, codegen="fx")
                mine.has_bits = stepper.values(plain).same_bits(stepper.expected)
        except (RuntimeError, MegaMoEError, AssertionError, TypeError) as error:
            mine.error = f"{type(error).__name__}: {error}"
        outcome = _worst_of_all_ranks(mine, variant.max_error)
        if not outcome.error:
            self.ways[variant.name] = way
            for _ in range(WARM_UP):
                stepper.run(way.forward)
        return outcome

    def _stepper(self, plan: Plan | None) -> Stepper:
        if plan not in self._steppers:
            self._steppers[plan] = Stepper(self._subjects.of(plan), self._link, self._clock)
        return self._steppers[plan]

    def _first(self, variant: Variant, way: _Way) -> Values:
        if variant.backend is None:
            return way.stepper.values(way.forward)
        with self._turns.turn(f"{self._job.case.name} {variant.name}"):
            return way.stepper.values(way.forward)

    def write_profile(self) -> None:
        baseline = self.ways[self._job.preset.baseline]
        steps = [baseline.timed(NO_LINK) for _ in range(ESTIMATE_STEPS)]
        compute_s = statistics.median(s.elapsed_s for s in steps)
        rate = link_rate(steps[-1], compute_s, RATIOS[self._job.preset.told], self._job.case)
        if self._rank == 0 and not self._job.profile.exists():
            profile = measure_profile(self._job.case, rate)
            write_profile(profile, self._job.profile)
        dist.barrier()

    def rounds(self, ratio: str, rate: LinkRate, num_rounds: int) -> None:
        self._say(f"{ratio}: {num_rounds} rounds of {len(self.ways)} variants")
        names = list(self.ways)
        gc.collect()
        gc.disable()
        for _ in range(num_rounds):
            names = [*names[1:], names[0]]
            for name in names:
                sample = self.ways[name].timed(rate)
                self.outcomes[name].samples.setdefault(ratio, []).append(sample)
        gc.enable()

    def settle(self) -> CaseResult:
        """Set the links' rates from what the baseline took without a link."""
        control = self.outcomes[self._job.preset.baseline].samples[NO_LINK_RATIO]
        compute_s = statistics.median(s.elapsed_s for s in control)
        traffic = control[-1].traffic
        rates = {
            name: link_rate(control[-1], compute_s, RATIOS[name], self._job.case)
            for name in self._job.preset.ratios
        }
        return CaseResult(
            compute_s=compute_s,
            rates=rates,
            comm_s={name: traffic.alone_s(rate) for name, rate in rates.items()},
            wire_bytes=traffic.wire_bytes,
            num_exchanges=traffic.num_exchanges,
            profile=self._job.profile.read_text(),
            outcomes=self.outcomes,
        )

    def _say(self, what: str) -> None:
        if self._rank == 0:
            sys.stderr.write(f"  {self._job.case.name}: {what}\n")
            sys.stderr.flush()


def _topology(case: Case) -> Topology:
    if not isinstance(case, NodesCase):
        return Topology(num_ranks=case.num_ranks)
    return Topology(
        num_ranks=case.num_ranks, num_local=case.num_local, shares_adapter=case.shares_adapter
    )


def link_rate(sample: Sample, compute_s: float, ratio: float, case: Case) -> LinkRate:
    """Return the link on which this step's exchanges alone take compute / ratio, between nodes."""
    moving_s = compute_s / ratio - sample.traffic.num_between * LATENCY_S
    rate = LinkRate(latency_s=LATENCY_S, bytes_per_s=sample.traffic.wire_bytes / moving_s)
    if not isinstance(case, NodesCase):
        return rate
    inside = rate.bytes_per_s / case.sharing_adapter * case.inside_speed
    return replace(rate, inside_latency_s=INSIDE_LATENCY_S, inside_bytes_per_s=inside)


def _worst_of_all_ranks(mine: Outcome, max_error: float) -> Outcome:
    """Return rank 0's outcome with the largest error of all ranks, on every rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    outcomes: list[Outcome] = gathered
    worst = max(o.relative_error for o in outcomes)
    error = next((o.error for o in outcomes if o.error), "")
    if not error and not worst <= max_error:
        error = f"differs from its reference by {worst:.3g}, relative"
    if not error and any(o.has_bits is False for o in outcomes):
        error = "has not the bits of its reference"
    return replace(outcomes[0], relative_error=worst, error=error)


def _pin(rank: int, num_ranks: int) -> None:
    """Keep the calling thread on a core of its own, where there is one for each rank."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= num_ranks:
        os.sched_setaffinity(0, {cores[rank]})
