"""Section `layer`: a MoE layer on this device by a real process group of one rank.

Contract
    Errors are against float64. A variant of ours that keeps bfloat16 may have 1.1 times plain
    Inductor's of the same tensor; one with eight bits on the wire the error of its variant.
    In code generated for two or more chunks matrix products run between a launch and the wait for
    it, forward and backward.
Step times here have exchanges among one rank in them, which are copies: overhead, not overlap.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Final

import torch
import torch.distributed as dist

from benchmarks.gpu.exact_layer import Tensors, exact_results, relative_errors
from benchmarks.gpu.layer_step import (
    GPU_VARIANTS,
    Compiled,
    LayerStep,
    StepTime,
    is_known,
    start_compiler,
)
from benchmarks.gpu.sizes import Sizes
from benchmarks.link.cases import BASELINE, QUANTIZED
from benchmarks.link.variants import Variant
from moe_compile.check.sections import Record, say

ALLOWED: Final = 1.1
"""Times plain Inductor's error."""
STEPS: Final = 7
GROUPS: Final = {"cuda": "nccl", "cpu": "gloo"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """What variants are held against."""

    exact: Tensors
    plain_errors: dict[str, float]
    """Of plain Inductor; empty while it is itself checked."""


def start_one_rank(backend: str) -> dist.ProcessGroup:
    """Return the default group: this process alone."""
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    return dist.group.WORLD


def check_layer(record: Record, sizes: Sizes) -> None:
    """Run the section."""
    start_compiler()
    group = start_one_rank(GROUPS[sizes.device])
    step = LayerStep(sizes.case, group, sizes.device)
    exact = exact_results(step.layer, step.tokens, step.grad)
    record.put(group=GROUPS[sizes.device], case=asdict(sizes.case))
    needs_s = sizes.compile_s
    plain: dict[str, float] = {}
    for name in sizes.layer_variants:
        reference = Reference(exact=exact, plain_errors=plain)
        found = record.attempt(
            name, lambda n=name, r=reference: _check(record, step, n, r), needs_s
        )
        if found is None:
            continue
        needs_s = max(needs_s, found.compile_s)
        if name == BASELINE:
            plain = record.data["rows"][-1]["errors"]
    dist.destroy_process_group()


def _check(record: Record, step: LayerStep, name: str, reference: Reference) -> Compiled:
    variant = GPU_VARIANTS[name]
    if not is_known(variant):
        raise LookupError("this torch has no such option")
    say(f"layer: compiling {name}")
    compiled = step.compile(variant, "detect")
    code = record.path.with_name(f"layer_{name.replace(' ', '_')}.code.py")
    code.write_text("\n".join(compiled.codes))
    errors = relative_errors(step.results(compiled.forward), reference.exact)
    peak, times = _measure(step, compiled)
    record.add_row(
        {
            "variant": name,
            "errors": errors,
            "times_inductors": {
                tensor: errors[tensor] / theirs for tensor, theirs in reference.plain_errors.items()
            },
            "compile_s": compiled.compile_s,
            "step_ms": 1e3 * statistics.median(t.seconds for t in times),
            "host_ms": 1e3 * statistics.median(t.host_s for t in times),
            "step_ms_all": [1e3 * t.seconds for t in times],
            "peak_mb": peak / 1e6,
            "orders": [asdict(order) for order in compiled.orders],
        }
    )
    _judge_errors(record, variant, errors, reference)
    if dict(variant.options).get("megamoe.chunks", 1) > 1:
        _judge_order(record, name, compiled)
    worst = max(errors, key=lambda tensor: errors[tensor])
    say(f"layer: {name}: worst error {errors[worst]:.4f} of {worst}; {compiled.compile_s:.0f} s")
    return compiled


def _measure(step: LayerStep, compiled: Compiled) -> tuple[int, list[StepTime]]:
    """Return the bytes a step adds at its peak and the times of several."""
    step.run(compiled.forward)
    step.clear()
    before = 0
    if step.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    times = [step.timed(compiled.forward) for _ in range(STEPS)]
    peak = torch.cuda.max_memory_allocated() if step.device == "cuda" else 0
    return peak - before, times


def _judge_errors(
    record: Record, variant: Variant, errors: dict[str, float], reference: Reference
) -> None:
    for tensor, error in errors.items():
        allowed = variant.max_error
        if QUANTIZED not in variant.name and tensor in reference.plain_errors:
            allowed = ALLOWED * reference.plain_errors[tensor]
        what = f"{variant.name}: {tensor}"
        record.expect(error <= allowed, what, f"error {error:.4g}, allowed {allowed:.4g}")


def _judge_order(record: Record, name: str, compiled: Compiled) -> None:
    record.expect(len(compiled.orders) == 2, name, f"{len(compiled.orders)} graphs, not 2")
    for direction, found in zip(("forward", "backward"), compiled.orders, strict=False):
        what = f"{name}, {direction}"
        why = f"no product under an exchange: {found.letters}"
        record.expect(any(found.products_under), what, why)
