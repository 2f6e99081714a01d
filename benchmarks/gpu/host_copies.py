"""Section `trace`: how often the host waits for the device in a step, by torch's profiler.

Contract
    Of a layer in one chunk or more, the host reads integers by one copy in the forward, and by none
    in the backward. Kernels are counted too: those of chunks beside those of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.layer_check import GROUPS, start_one_rank
from benchmarks.gpu.layer_step import GPU_VARIANTS, Compiled, LayerStep, start_compiler
from benchmarks.gpu.sizes import Sizes
from moe_compile.check.sections import Record, say
from moe_compile.hardware.measure import synchronize

TO_HOST: Final = "Memcpy DtoH"
"""What Kineto calls a copy from the device to the host."""
NO_KERNEL: Final = ("Memcpy", "Memset")
NAMED: Final = 12
"""Kernels by name in the results: those that run most often."""


def check_trace(record: Record, sizes: Sizes) -> None:
    """Run the section."""
    start_compiler()
    group = start_one_rank(GROUPS[sizes.device])
    step = LayerStep(sizes.case, group, sizes.device)
    needs_s = sizes.compile_s
    for name in (v for v in sizes.layer_variants if v.startswith("megamoe")):
        found = record.attempt(name, lambda n=name: _trace(record, step, n), needs_s)
        needs_s = max(needs_s, found.compile_s) if found is not None else needs_s
    dist.destroy_process_group()


def _trace(record: Record, step: LayerStep, name: str) -> Compiled:
    compiled = step.compile(GPU_VARIANTS[name], "detect")
    step.run(compiled.forward)  # what is compiled or allocated once is behind it
    step.clear()
    forward = _device_events(step.device, lambda: compiled.forward(step.tokens))
    out = compiled.forward(step.tokens)
    backward = _device_events(step.device, lambda: out.backward(step.grad))
    row: dict[str, Any] = {"variant": name}
    for phase, events, most in (("forward", forward, 1), ("backward", backward, 0)):
        copies, kernels = judge_events(
            record, events, f"{name}, {phase}", most=most, device=step.device
        )
        row |= {f"{phase}_copies": copies, f"{phase}_kernels": sum(kernels.values())}
        row[f"{phase}_most"] = kernels.most_common(NAMED)
    record.add_row(row)
    say(f"trace: {name}: {row['forward_copies']} and {row['backward_copies']} copies to the host")
    return compiled


def judge_events(
    record: Record, events: Counter[str], what: str, *, most: int, device: str
) -> tuple[int, Counter[str]]:
    """Return how often the host read, and the kernels; on a CUDA device there must be some."""
    copies = sum(n for event, n in events.items() if event.startswith(TO_HOST))
    kernels = Counter({e: n for e, n in events.items() if not e.startswith(NO_KERNEL)})
    record.expect(copies <= most, what, f"{copies} copies to the host, of {most}")
    if device == "cuda":
        record.expect(copies >= most, what, f"the profiler saw {copies} copies to the host")
        record.expect(bool(kernels), what, f"the profiler saw {sum(kernels.values())} kernels")
    return copies, kernels


def _device_events(device: str, work: Callable[[], object]) -> Counter[str]:
    """Return how often each kernel and copy ran on the device; none of a processor's."""
    synchronize(device)
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        work()
        synchronize(device)
    return on_device(profiled.events())


def on_device(events: Iterable[FunctionEvent]) -> Counter[str]:
    """Count those of a CUDA device by name. Enumerators of torch are made anew: equal, not one."""
    return Counter(e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA)
