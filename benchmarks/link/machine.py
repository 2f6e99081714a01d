"""What this machine's processor does per second, as megamoe's hardware profile."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch

from benchmarks.link.cases import Case, NodesCase
from benchmarks.link.link_model import LinkRate
from moe_compile.hardware import HardwareProfile, Link
from moe_compile.hardware.links import NUMBERS
from moe_compile.hardware.measure import cpu_name, memory_gb_per_s, op_overhead_us, seconds_of

CPU: Final = "cpu"


def measure_profile(case: Case, rate: LinkRate) -> HardwareProfile:
    """Measure this thread's rates at the sizes of `case`; the links' are the emulated ones'."""
    return HardwareProfile(
        name=f"{cpu_name()}, one thread; emulated link",
        matmul_tflops=_matmul_tflops(case),
        memory_gb_per_s=memory_gb_per_s(CPU),
        op_overhead_us=op_overhead_us(CPU),
        link_gb_per_s=rate.bytes_per_s / _sharing_adapter(case) / 1e9,
        link_latency_us=rate.latency_s * 1e6,
        node=_node_link(case, rate),
        origins=_origins(),
    )


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """Write `profile` as the TOML that `megamoe.hardware` takes, to two digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.as_toml())


def _sharing_adapter(case: Case) -> int:
    return case.sharing_adapter if isinstance(case, NodesCase) else 1


def _node_link(case: Case, rate: LinkRate) -> Link | None:
    """Return the link inside a node, where the case has nodes."""
    if not isinstance(case, NodesCase):
        return None
    return Link(
        num_ranks=case.num_local,
        gb_per_s=rate.inside_bytes_per_s / 1e9,
        latency_us=rate.inside_latency_s * 1e6,
        origins=dict.fromkeys(NUMBERS, emulated_link_origin()),
    )


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
