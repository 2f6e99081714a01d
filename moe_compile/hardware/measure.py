"""Times of work on one device, and its rates by running small kernels on it; imports torch.

Contract
    On a GPU times are the device's, between CUDA events around work queued back to back. Rates are
    of medians, after one round to warm up; on a processor of this thread's own time.
"""

from __future__ import annotations

import functools
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

CUDA: Final = "cuda"
REPEATS: Final = 7
COPIED_BYTES: Final = {CUDA: 2**30, "cpu": 64 * 2**20}
"""Bytes that exceed the last-level cache, of the GPU or for one core."""
SMALL_OPS: Final = 1000
MATRIX: Final = {CUDA: 8192, "cpu": 512}
"""Number of rows and of columns of a large product."""
GROUPED_WIDTH: Final = {CUDA: 4096, "cpu": 512}
GROUPED_HIDDEN: Final = {CUDA: 14336, "cpu": 1792}
"""Sizes of the experts measured: those of Mixtral-8x7B, an eighth of them on a processor."""
ROWS: Final = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Rows per expert at which curves are measured."""
DIGITS: Final = 4
"""Significant digits that are told; medians repeat to two or three."""
HEAD_START_CYCLES: Final = 2_000_000
"""Cycles that the device spins, about a millisecond, to hide the host's launches."""


def device_name(device: str) -> str:
    """Return the device's own name; of a processor one thread is measured."""
    return torch.cuda.get_device_name() if device == CUDA else f"one thread of {cpu_name()}"


def cpu_name() -> str:
    """Return this machine's own name for its processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"


def measured_rates(device: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rates of a device by their dotted path in a profile; `table` is its TOML's.

    Peaks are those of the table, and so are the rates that curves are shares of.
    """
    memory = memory_gb_per_s(device)
    found: dict[str, Any] = {
        "matmul_tflops": _short(matmul_tflops(device)),
        "memory_gb_per_s": _short(memory),
        "op_overhead_us": _short(op_overhead_us(device)),
    }
    if "compute" not in table:
        return found
    compute = table["compute"]
    peak = compute["bf16_tflops"]["value"]
    long = GROUPED_WIDTH[device] / (GROUPED_WIDTH[device] + compute["half_reduction"]["value"])
    found["memory.share"] = _short(min(memory / table["memory"]["gb_per_s"]["value"], 1.0))
    found["compute.gemm_share"] = _short(min(found["matmul_tflops"] / peak, 1.0))
    for name, is_gradient in (("grouped_forward", False), ("grouped_weight_gradient", True)):
        shares = grouped_shares(device, ROWS, peak, is_gradient=is_gradient)
        scale = 1.0 if is_gradient else long  # the model counts the reduction apart
        found[f"compute.{name}"] = [[n, _short(min(s / scale, 1.0))] for n, s in shares]
    return found


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def matmul_tflops(device: str) -> float:
    """Return the rate of a large bf16 product, 1e12 operations per second."""
    size = MATRIX[device]
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * size**3 / seconds_of(device, lambda: torch.mm(left, right)) / 1e12


def memory_gb_per_s(device: str) -> float:
    """Return the rate of a copy, bytes read and bytes written, 1e9 per second."""
    source = torch.zeros(COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.numel() / seconds_of(device, lambda: target.copy_(source)) / 1e9


def op_overhead_us(device: str) -> float:
    """Return the time of one tiny operator among many, microseconds."""
    x = torch.zeros(8, device=device)

    def many() -> None:
        for _ in range(SMALL_OPS):
            torch.add(x, 1.0, out=x)

    return seconds_of(device, many, head_start=False) / SMALL_OPS * 1e6


def grouped_shares(
    device: str, rows: Sequence[int], peak_tflops: float, *, is_gradient: bool
) -> list[tuple[int, float]]:
    """Return (rows per expert, share of the peak) of a grouped GEMM, or of its weight gradient.

    Four experts of `GROUPED_WIDTH` and `GROUPED_HIDDEN`.
    """
    experts, width, hidden = 4, GROUPED_WIDTH[device], GROUPED_HIDDEN[device]
    weight = torch.randn(experts, width, hidden, device=device, dtype=torch.bfloat16)
    shares = []
    for count in rows:
        x = torch.randn(experts * count, width, device=device, dtype=torch.bfloat16)
        made = torch.randn(experts * count, hidden, device=device, dtype=torch.bfloat16)
        ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * count

        def product(x: Any = x, made: Any = made, ends: Any = ends) -> Any:
            if is_gradient:
                return torch._grouped_mm(x.t(), made, offs=ends)
            return torch._grouped_mm(x, weight, offs=ends)

        operations = 2.0 * experts * count * width * hidden
        shares.append((count, operations / seconds_of(device, product) / 1e12 / peak_tflops))
    return shares


def seconds_of(device: str, work: Callable[[], Any], *, head_start: bool = True) -> float:
    """Return the median seconds of `work`."""
    if device != CUDA:
        torch.set_num_threads(1)
    work()
    cycles = HEAD_START_CYCLES if head_start else 0
    once = functools.partial(elapsed_s, device, work, cycles, clock=time.thread_time)
    return statistics.median(once() for _ in range(REPEATS))


def elapsed_s(
    device: str,
    work: Callable[[], Any],
    head_start_cycles: int = 0,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of `work`: on a GPU from before its first kernel to after its last.

    With a head start the device spins before the time begins, so that a host slower at launching
    than the device at running does not count; for work that the host does not wait within. On a
    processor the seconds are those of `clock`.
    """
    if device != CUDA:
        began = clock()
        work()
        return clock() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if head_start_cycles:
        torch.cuda._sleep(head_start_cycles)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def synchronize(device: str) -> None:
    """Wait for all device work."""
    if device == CUDA:
        torch.cuda.synchronize()
