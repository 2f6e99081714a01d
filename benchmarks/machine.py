"""What this machine is and what its processor does per second, as megamoe's hardware profile."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.cases import LATENCY_S, Case
from moe_compile.hardware import HardwareProfile

REPEATS: Final = 7
COPIED_BYTES: Final = 64 * 2**20
"""More than the last-level cache keeps for one core."""
SMALL_OPS: Final = 1000


def describe_machine() -> dict[str, Any]:
    """Return hardware and versions, for the head of the results."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megamoe": _revision(),
    }


def measure_profile(case: Case, link_bytes_per_s: float) -> HardwareProfile:
    """Measure this thread's rates at the sizes of `case`; the link's is the emulated one's."""
    return HardwareProfile(
        name=f"{_cpu_name()}, one thread; emulated link",
        matmul_tflops=_matmul_tflops(case),
        memory_gb_per_s=_memory_gb_per_s(),
        op_overhead_us=_op_overhead_us(),
        link_gb_per_s=link_bytes_per_s / 1e9,
        link_latency_us=LATENCY_S * 1e6,
        origins=_origins(),
    )


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """Write `profile` as the TOML that `megamoe.hardware` takes, to two digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.as_toml())


def emulated_link_origin() -> str:
    """Return the origin of a rate of the emulated link: it is set, not measured."""
    return "assumed: the emulated link of this benchmark"


def _origins() -> dict[str, str]:
    measured = f"measured: {datetime.now(UTC).date()} on one thread of {_cpu_name()}"
    rates = dict.fromkeys(("matmul_tflops", "memory_gb_per_s", "op_overhead_us"), measured)
    link = dict.fromkeys(("link_gb_per_s", "link_latency_us"), emulated_link_origin())
    return {**rates, **link}


def _matmul_tflops(case: Case) -> float:
    rows = case.tokens * case.top_k
    experts = case.experts // case.num_ranks
    x = torch.randn(rows, case.width, dtype=torch.bfloat16)
    weight = torch.randn(experts, case.width, case.hidden, dtype=torch.bfloat16)
    ends = torch.arange(1, experts + 1, dtype=torch.int32) * (rows // experts)
    seconds = _seconds(lambda: torch._grouped_mm(x, weight, offs=ends))
    return 2.0 * rows * case.width * case.hidden / seconds / 1e12


def _memory_gb_per_s() -> float:
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source))
    return 2.0 * COPIED_BYTES / seconds / 1e9


def _op_overhead_us() -> float:
    x = torch.zeros(8)

    def many() -> None:
        for _ in range(SMALL_OPS):
            torch.add(x, 1.0, out=x)

    return _seconds(many) / SMALL_OPS * 1e6


def _seconds(work: Callable[[], Any]) -> float:
    """Return the median CPU time of this thread for `work`, after one call to warm up."""
    work()
    times = []
    for _ in range(REPEATS):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return statistics.median(times)


def _revision() -> str:
    """Return the commit these sources are at, `-dirty` when they differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"
