"""Layers, routings, devices and ratios that predictions are held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.link.cases import RATIOS, Case
from moe_compile.hardware import HardwareProfile, load_profile

RATIO_NAMES: Final = ("2:1", "1:1", "1:2")
SMALLER: Final = 128
"""A layer here has 1/8 of the tokens and 1/16 of the widths of one that an H100 would run."""
NARROWER: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One layer on one emulated device, its routing stated."""

    case: Case
    device: str = "cpu"
    """Name in DEVICES."""
    routing: str = "even"
    """`even`, `busy rank`, `hot expert`, or `drawn`: what a random router makes of random tokens,
    about even."""
    imbalance: float = 1.0
    """Rows of rank 0 over the mean, as stated to the price; `drawn` states none."""

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Return each expert's share of the rows, unnormalised; None where it is drawn."""
        if self.routing == "drawn":
            return None
        ranks, experts = self.case.num_ranks, self.case.experts
        local = experts // ranks
        busy = self.imbalance * (ranks - 1) / (ranks - self.imbalance)
        if self.routing == "hot expert":  # all that rank 0 has more goes to its first expert
            return (busy * local - local + 1.0, *(1.0 for _ in range(experts - 1)))
        return (*(busy for _ in range(local)), *(1.0 for _ in range(experts - local)))

    @property
    def numbers_of_chunks(self) -> tuple[int, ...]:
        """Return every number of equal chunks that the planner chooses among."""
        local = self.case.experts // self.case.num_ranks
        return tuple(n for n in (1, 2, 4, 8) if local % n == 0)


def _case(name: str, num_ranks: int, experts: int, **sizes: int) -> Case:
    settled = {"tokens": 512, "width": 256, "hidden": 256, "top_k": 2, **sizes}
    shared = bool(settled.pop("shared", 0))
    return Case(name=name, num_ranks=num_ranks, experts=experts, shared_expert=shared, **settled)


BASE: Final = _case("base", 2, 8, tokens=1024)
SETTINGS: Final = (
    Setting(case=BASE),
    Setting(case=_case("shared", 2, 8, shared=1)),
    Setting(case=_case("two-local", 2, 4, tokens=768, hidden=512, top_k=1)),
    Setting(case=_case("busy-rank", 2, 8), routing="busy rank", imbalance=1.25),
    Setting(case=_case("hot-expert", 2, 8), routing="hot expert", imbalance=1.1),
    Setting(case=_case("gpu-like", 2, 8, hidden=128), device="gpu-like"),
    Setting(case=_case("eight-local", 2, 16, width=384)),
    Setting(case=_case("small-experts", 2, 16, hidden=96, top_k=4)),
    Setting(case=_case("four-ranks", 4, 16)),
    Setting(case=_case("four-top-4", 4, 8, top_k=4, shared=1)),
    Setting(case=_case("four-busy", 4, 16, top_k=4), routing="busy rank", imbalance=1.5),
    Setting(case=_case("four-drawn", 4, 16, tokens=1024), routing="drawn"),
    Setting(case=_case("four-gpu-like", 4, 16, hidden=128, shared=1), device="gpu-like"),
)
"""Each at every ratio and in every number of chunks."""


def emulated_devices() -> Mapping[str, HardwareProfile]:
    """Return the devices that durations are emulated of; compute and links do not slow each other.

    `gpu-like` makes of a layer of 512 tokens and width 256 what an H100 makes of one of 4096 and
    4096: rates are divided by what is less to do, fixed costs stay.
    """
    h100 = load_profile("h100")
    gpu = replace(
        h100,
        name="an H100 with less to do",
        matmul_tflops=h100.matmul_tflops / (SMALLER * NARROWER),
        memory_gb_per_s=h100.memory_gb_per_s / SMALLER,
        node=None,
        network=None,
        compute=None,
    )
    return {"cpu": load_profile("cpu"), "gpu-like": gpu}


def ratio_of(name: str) -> float:
    """Return compute over communication."""
    return RATIOS[name]
