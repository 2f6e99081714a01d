"""What was measured, as the rows people read and the JSON that is kept.

Terms
    bound_ms       max(compute, comm): what a step takes at best when all that can overlap does.
    compute        plain Inductor's step on a link that takes no time.
    comm           its exchanges one after the other on the modelled link, no compute at all.
    own_comm       the same of a variant's own exchanges: plans of a block differ in bytes.
    least          what a step takes at least in any order of its own kernels: of forward and of
                   backward the longer of compute, as without a link, and exchanges.
    vs_*           median over rounds of this variant's time / that one's, in the same round.

Of a block "inductor" is the preset's baseline, the block divided by heads and by slices of experts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.link.cases import NO_LINK_RATIO, QUANTIZED
from benchmarks.link.link_model import NO_LINK, LinkRate
from benchmarks.link.measure import CaseResult, Job, Outcome
from benchmarks.link.step import Sample
from moe_compile.check.paired import Estimate, ratio

LEAST_CONTROL: Final = 0.95
"""Below this ratio without a link a variant saves compute, or the machine was busy: part of what
it gains elsewhere is then not overlap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One variant at one ratio; times in milliseconds, None where it failed."""

    case: str
    ranks: int
    ratio: str
    variant: str
    ms: float | None = None
    ms_quartiles: tuple[float, float] | None = None
    vs_inductor: float | None = None
    vs_inductor_interval: tuple[float, float] | None = None
    vs_inductor_reorder: float | None = None
    rival: str = ""
    vs_rival: float | None = None
    vs_rival_interval: tuple[float, float] | None = None
    bound_ms: float | None = None
    bound_fraction: float | None = None
    inf_bandwidth_ratio: float | None = None
    inf_bandwidth_interval: tuple[float, float] | None = None
    inf_bandwidth_pairs: int | None = None
    waited_ms: float | None = None
    """Added by waits: exposed communication and waiting for slower ranks."""
    link_host_ms: float | None = None
    """CPU time of the emulator itself, part of `ms`."""
    own_comm_ms: float | None = None
    forward_ms: float | None = None
    """Of `ms`."""
    least_ms: float | None = None
    exchanges: int | None = None
    wire_bytes: float | None = None
    """That crossed the link in one step; of two links, the one between nodes."""
    inside_bytes: float | None = None
    """That crossed the link inside a node."""
    vs_best_same_wire: float | None = None
    """Against the fastest variant, at this ratio, whose rows travel unquantised."""
    page_faults: float | None = None
    compile_s: float | None = None
    compile_from_cache: bool | None = None
    relative_error: float | None = None
    has_bits: bool | None = None
    """Whether it has eager's bits with codegen = "fx", on all ranks; None where it need not."""
    error: str = ""


def rows_of(job: Job, result: CaseResult) -> list[Row]:
    """Return a row for every variant at every ratio, the control first."""
    return [
        _row(job, result, name, outcome, ratio_name)
        for ratio_name in (NO_LINK_RATIO, *job.preset.ratios)
        for name, outcome in result.outcomes.items()
    ]


def warnings_of(rows: list[Row]) -> list[str]:
    """Return what a reader must know before believing the ratios."""
    return [
        f"{row.case}, {row.variant}: {row.inf_bandwidth_ratio:.2f} of the baseline without a link; "
        "part of its gain is compute saved or noise, not overlap"
        for row in rows
        if row.ratio == NO_LINK_RATIO
        and row.inf_bandwidth_ratio is not None
        and row.inf_bandwidth_ratio < LEAST_CONTROL
    ]


def header_of_case(job: Job, result: CaseResult) -> dict[str, Any]:
    """Return what the rows of one case were measured with."""
    return {
        **asdict(job.case),
        "clock": job.clock,
        "compute_ms": result.compute_s * 1e3,
        "comm_ms": {name: seconds * 1e3 for name, seconds in result.comm_s.items()},
        "wire_bytes_per_step": result.wire_bytes,
        "exchanges_per_step": result.num_exchanges,
        "links": {name: _link_of(rate) for name, rate in result.rates.items()},
        "megamoe_profile": result.profile,
    }


def _link_of(rate: LinkRate) -> dict[str, float]:
    """Return the link's rates; those of a link inside nodes where there is one."""
    link = {"latency_us": rate.latency_s * 1e6, "mb_per_s": rate.bytes_per_s / 1e6}
    if math.isinf(rate.inside_bytes_per_s):
        return link
    inside = rate.inside_latency_s * 1e6, rate.inside_bytes_per_s / 1e6
    return link | dict(zip(("inside_latency_us", "inside_mb_per_s"), inside, strict=True))


def with_other_cases(report: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return `report` with the cases of the file `before` that it does not have, first."""
    new = {case["name"] for case in report["cases"]}
    cases = [case for case in before["cases"] if case["name"] not in new]
    rows = [row for row in before["rows"] if row["case"] not in new]
    return {**report, "cases": cases + report["cases"], "rows": rows + report["rows"]}


def _row(job: Job, result: CaseResult, name: str, outcome: Outcome, ratio_name: str) -> Row:
    place = {
        "case": job.case.name,
        "ranks": job.case.num_ranks,
        "ratio": ratio_name,
        "variant": name,
    }
    if outcome.error:
        return Row(**place, error=outcome.error)
    samples = outcome.samples[ratio_name]
    times = [s.elapsed_s * 1e3 for s in samples]
    ms = statistics.median(times)
    bound_ms = 1e3 * max(result.compute_s, result.comm_s.get(ratio_name, 0.0))
    control = _against(result, name, job.preset.baseline, NO_LINK_RATIO)
    here = _against(result, name, job.preset.baseline, ratio_name)
    reordered = _against(result, name, job.preset.reordered, ratio_name)
    low, _, high = statistics.quantiles(times, n=4)
    return Row(
        **place,
        ms=ms,
        ms_quartiles=(low, high),
        vs_inductor=here and here.median,
        vs_inductor_interval=here and (here.low, here.high),
        vs_inductor_reorder=reordered and reordered.median,
        bound_ms=bound_ms,
        bound_fraction=bound_ms / ms,
        inf_bandwidth_ratio=control and control.median,
        inf_bandwidth_interval=control and (control.low, control.high),
        inf_bandwidth_pairs=control and control.num_pairs,
        compile_s=outcome.compile_s,
        compile_from_cache=outcome.is_from_cache,
        relative_error=outcome.relative_error,
        has_bits=outcome.has_bits,
        least_ms=1e3 * _least_s(outcome, samples[-1], result.rates.get(ratio_name, NO_LINK)),
        vs_best_same_wire=_against_best(result, name, ratio_name),
        **_against_rival(result, name, ratio_name),
        **_medians(samples, result.rates.get(ratio_name, NO_LINK)),
    )


def _least_s(outcome: Outcome, sample: Sample, rate: LinkRate) -> float:
    """Return the least time of a variant's step; see the module docstring."""
    control = outcome.samples[NO_LINK_RATIO]
    forward_s = statistics.median(s.forward_s for s in control)
    backward_s = statistics.median(s.elapsed_s - s.forward_s for s in control)
    crossings, num = sample.traffic.crossings, sample.forward_exchanges
    there, back = (
        sum(crossing.alone_s(rate) for crossing in phase)
        for phase in (crossings[:num], crossings[num:])
    )
    return max(forward_s, there) + max(backward_s, back)


def _medians(samples: list[Sample], rate: LinkRate) -> dict[str, Any]:
    return {
        "own_comm_ms": 1e3 * samples[-1].traffic.alone_s(rate),
        "forward_ms": 1e3 * statistics.median(s.forward_s for s in samples),
        "waited_ms": 1e3 * statistics.median(s.traffic.waited_s for s in samples),
        "link_host_ms": 1e3 * statistics.median(s.traffic.host_s for s in samples),
        "exchanges": samples[-1].traffic.num_exchanges,
        "wire_bytes": samples[-1].traffic.wire_bytes,
        "inside_bytes": samples[-1].traffic.inside_bytes,
        "page_faults": statistics.median(s.page_faults for s in samples),
    }


def _against_rival(result: CaseResult, name: str, ratio_name: str) -> dict[str, Any]:
    rival = _fastest(result, result.outcomes[name].rivals, ratio_name)
    found = _against(result, name, rival, ratio_name)
    return {
        "rival": rival,
        "vs_rival": found and found.median,
        "vs_rival_interval": found and (found.low, found.high),
    }


def _against_best(result: CaseResult, name: str, ratio_name: str) -> float | None:
    """Return the ratio to the fastest of the variants without a quantised wire."""
    plain = [other for other in result.outcomes if QUANTIZED not in other]
    best = _against(result, name, _fastest(result, plain, ratio_name), ratio_name)
    return best and best.median


def _fastest(result: CaseResult, names: Iterable[str], ratio_name: str) -> str:
    """Return the variant of `names` that ran fastest; "" where none ran."""
    medians = {
        name: statistics.median(s.elapsed_s for s in result.outcomes[name].samples[ratio_name])
        for name in names
        if name in result.outcomes and not result.outcomes[name].error
    }
    return min(medians, key=medians.__getitem__, default="")


def _against(result: CaseResult, name: str, other: str, ratio_name: str) -> Estimate | None:
    if other not in result.outcomes or result.outcomes[other].error:
        return None
    times = [[s.elapsed_s for s in result.outcomes[n].samples[ratio_name]] for n in (name, other)]
    return ratio(*times)
