"""What this machine is and what its processor does per second, as megamoe's hardware profile."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.cases import LATENCY_S, Case
from moe_compile.hardware import HardwareProfile
from moe_compile.hardware.measure import cpu_name, memory_gb_per_s, op_overhead_us, seconds_of

CPU: Final = "cpu"


def describe_machine() -> dict[str, Any]:
    """Return hardware and versions, for the head of the results."""
    return {
        "cpu": cpu_name(),
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
        name=f"{cpu_name()}, one thread; emulated link",
        matmul_tflops=_matmul_tflops(case),
        memory_gb_per_s=memory_gb_per_s(CPU),
        op_overhead_us=op_overhead_us(CPU),
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
    measured = f"measured: {datetime.now(UTC).date()} on one thread of {cpu_name()}"
    rates = dict.fromkeys(("matmul_tflops", "memory_gb_per_s", "op_overhead_us"), measured)
    link = dict.fromkeys(("link_gb_per_s", "link_latency_us"), emulated_link_origin())
    return {**rates, **link}


def _matmul_tflops(case: Case) -> float:
    rows = case.tokens * case.top_k
    experts = case.experts // case.num_ranks
    x = torch.randn(rows, case.width, dtype=torch.bfloat16)
    weight = torch.randn(experts, case.width, case.hidden, dtype=torch.bfloat16)
    ends = torch.arange(1, experts + 1, dtype=torch.int32) * (rows // experts)
    seconds = seconds_of(CPU, lambda: torch._grouped_mm(x, weight, offs=ends))
    return 2.0 * rows * case.width * case.hidden / seconds / 1e12


def _revision() -> str:
    """Return the commit these sources are at, `-dirty` when they differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()
