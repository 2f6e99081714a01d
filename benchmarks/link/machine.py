"""What this machine's processor does per second, as megamoe's hardware profile."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch

from benchmarks.link.cases import LATENCY_S, Case
from moe_compile.hardware import HardwareProfile
from moe_compile.hardware.measure import cpu_name, memory_gb_per_s, op_overhead_us, seconds_of

CPU: Final = "cpu"


def measure_profile(case: Case, link_bytes_per_s: float) -> HardwareProfile:
    """Measure this thread's rates at the sizes of `case`; the link's is the emulated one's."""
    return HardwareProfile(
        name=f"{cpu_name()}, one thread; emulated link",
        matmul_tflops=_matmul_tflops(case),
        memory_gb_per_s=memory_gb_per_s(CPU),
        op_overhead_us=op_overhead_us(CPU),
        link_gb_per_s=link_bytes_per_s / 1e9,
        link_latency_us=LATENCY_S * 1e6,
        inter_node_overlap_slowdown=0.0,  # an exchange takes as long whatever runs beside it
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
