"""Section `hidden`: exposed and hidden communication of a layer by the profiler, and as predicted.

One layer in one chunk, in chunks, in two hops and in parts of the batch, beside plain Inductor and
Inductor with its own reordering of collectives.

Contract
    Exposed is the time of collectives while nothing is computed, hidden the rest of it, of this
    rank's step, forward and backward (`moe_compile/check/profiler_trace.py`); the worst rank tells.
    A trace without collectives fails on a GPU. On a processor these are times of gloo's threads.
    Steps of all variants are timed in turn at the end. Results are within the variant's error of
    eager ones.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.exact_layer import relative_errors
from benchmarks.gpu.layer_step import GPU_VARIANTS, Forward, LayerStep, is_known, start_compiler
from benchmarks.link.cases import BASELINE
from benchmarks.link.variants import Variant
from benchmarks.node.sizes import Sizes
from moe_compile.check.paired import ratio
from moe_compile.check.profiler_trace import measure, read_trace
from moe_compile.check.sections import Record, say
from moe_compile.check.team import Team, slowest
from moe_compile.hardware.measure import synchronize
from moe_compile.report.process_report import figures
from moe_compile.runtime.launch_records import executed_records
from moe_compile.testing.process_groups import register_nodes

NODES: Final = 2
"""Into which ranks are divided for two hops, of one machine too."""
PREDICTED: Final = ("compute_us", "exposed_us", "hidden_us")
IN_TURN: Final = "steps in turn"


@dataclass(kw_only=True, slots=True)
class _Layer:
    """What one process of a rank keeps between items."""

    sizes: Sizes
    out: Path
    step: LayerStep | None = None
    compiled: dict[str, Forward] = field(default_factory=dict)


def check_hidden(team: Team, sizes: Sizes, out: Path) -> None:
    """Run the section; traces go to the folder `out`."""
    start_compiler()
    layer = _Layer(sizes=sizes, out=out)
    for name in sizes.hidden_variants:
        variant = on_device(GPU_VARIANTS[name], sizes.device)
        is_hop = variant.options.get("megamoe.nodes", "off") != "off"
        if team.record is not None and (why := why_not(variant, team.num_ranks, is_hop=is_hop)):
            team.record.skip(name, why)
        if why_not(variant, team.num_ranks, is_hop=is_hop):
            continue
        team.run(
            name,
            partial(_measure, layer, variant),
            partial(judge_variant, variant, sizes.device),
            needs_s=sizes.compile_s,
        )
    team.run(IN_TURN, partial(_in_turn, layer), judge_steps, needs_s=sizes.compile_s)


def on_device(variant: Variant, device: str) -> Variant:
    """Return the variant, without Inductor's code on a processor, where that takes minutes."""
    if device == "cuda" or variant.backend != "megamoe":
        return variant
    return replace(variant, options={**variant.options, "megamoe.codegen": "fx"})


def why_not(variant: Variant, num_ranks: int, *, is_hop: bool) -> str:
    """Return why a variant cannot be run, "" where it can."""
    if is_hop and (num_ranks % NODES or num_ranks < 2 * NODES):
        return f"two hops want {NODES} nodes of two ranks at least, here are {num_ranks} ranks"
    return "" if is_known(variant) else "this torch has no such option of Inductor"


def _measure(layer: _Layer, variant: Variant) -> dict[str, Any]:
    """Compile and run a variant on this rank; return what was found."""
    case = replace(layer.sizes.case, num_ranks=dist.get_world_size())
    if layer.step is None:
        layer.step = LayerStep(case, dist.group.WORLD, layer.sizes.device)
    if variant.options.get("megamoe.nodes", "off") != "off":
        register_nodes(NODES)
    known = len(executed_records())
    compiled = layer.step.compile(variant, "detect" if layer.sizes.device == "cuda" else "cpu")
    eager = layer.step.results(layer.step.layer)
    errors = relative_errors(layer.step.results(compiled.forward), eager)
    layer.compiled[variant.name] = compiled.forward
    return {
        "compile_s": compiled.compile_s,
        "errors": errors,
        "predicted": predicted(executed_records()[known:]),
        **_traced(layer, variant.name),
    }


def predicted(records: list[Mapping[str, Any]]) -> dict[str, float]:
    """Return what graphs, forward and backward, are predicted to take together, ms."""
    found = [figures(record) for record in records]
    return {
        name.replace("_us", "_ms"): sum(one.get(name, 0.0) for one in found) / 1e3
        for name in PREDICTED
        if any(name in one for one in found)
    }


def _traced(layer: _Layer, name: str) -> dict[str, float]:
    """Return hidden and exposed ms of one step; {} where no collective is in the trace."""
    step = layer.step
    assert step is not None
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] * (step.device == "cuda")
    step.run(layer.compiled[name])
    synchronize(step.device)
    dist.barrier()
    with profile(activities=activities) as profiled:
        step.run(layer.compiled[name])
        synchronize(step.device)
    path = layer.out / f"hidden_{name.replace(' ', '_')}_rank{dist.get_rank()}.trace.json"
    profiled.export_chrome_trace(str(path))
    return measure(read_trace(path))


def judge_variant(
    variant: Variant, device: str, record: Record, found: list[dict[str, Any]]
) -> None:
    """Record a row of the rank with most exposed; what is wrong, or was not measured, fails."""
    worst = max(found, key=lambda one: one.get("exposed_ms", 0.0))
    errors = {k: max(one["errors"][k] for one in found) for k in worst["errors"]}
    record.add_row({"variant": variant.name, **worst, "errors": errors})
    wrong = {k: error for k, error in errors.items() if not error <= variant.max_error}
    why = f"errors against eager, allowed {variant.max_error:.3g}: {json.dumps(wrong)}"
    record.expect(not wrong, variant.name, why)
    total = worst.get("exposed_ms", 0.0) + worst.get("hidden_ms", 0.0)
    if device == "cuda":
        record.expect(total > 0.0, variant.name, "the trace has no collective")
    told = (
        f"{worst['exposed_ms']:.2f} ms exposed of {total:.2f}" if total else "no collective traced"
    )
    say(f"hidden: {variant.name}: {told}; predicted {worst['predicted'] or 'nothing'}")


def _in_turn(layer: _Layer) -> dict[str, list[float]]:
    """Return the seconds of steps of all variants, of the slowest rank, in rounds."""
    step = layer.step
    if step is None:
        return {}
    seconds: dict[str, list[float]] = {name: [] for name in layer.compiled}
    names = list(seconds)
    for _ in range(layer.sizes.repeats):
        names = [*names[1:], *names[:1]]
        for name in names:
            dist.barrier()
            seconds[name].append(step.timed(layer.compiled[name]).seconds)
    return {name: slowest(taken) for name, taken in seconds.items()}


def judge_steps(record: Record, found: list[dict[str, list[float]]]) -> None:
    """Record each variant's step, and its ratio to the fastest of Inductor's; none at all fails."""
    seconds = found[0]
    record.expect(bool(seconds), IN_TURN, "no variant was compiled")
    theirs = [name for name in seconds if name.startswith(BASELINE)]
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    best = min(theirs, key=lambda name: medians[name], default="")
    steps = [
        {
            "variant": name,
            "step_ms": 1e3 * medians[name],
            "vs_best_inductor": asdict(ratio(taken, seconds[best])) if best else None,
        }
        for name, taken in seconds.items()
    ]
    record.put(steps=steps, best_inductor=best)
    say("hidden: steps, ms: " + ", ".join(f"{s['variant']} {s['step_ms']:.2f}" for s in steps))
