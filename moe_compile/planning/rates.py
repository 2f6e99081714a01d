"""Rates that price work around one process group, each with how far it may be off.

Contract
    A function of the hardware profile and of the number of ranks: the same on every rank.
    A group no larger than the profile's node is taken to lie within one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Final, Self

from moe_compile.hardware import HardwareProfile

US_PER_S: Final = 1e6
UNCERTAINTY: Final = {
    "measured": 0.10,
    "datasheet": 0.10,
    "fitted": 0.10,
    "literature": 0.20,
    "computed": 0.20,
    "assumed": 0.20,
}
"""Kind of a number's origin -> share by which it may be off. Assumed: a measured rate moves by
about a tenth between runs and devices of one kind."""
UNKNOWN: Final = 0.20
"""Of a rate whose origin nobody stated, or that a profile does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What time divides by; the same units as the profile's."""

    matmul_tflops: float
    memory_gb_per_s: float
    op_overhead_us: float
    link_gb_per_s: float
    link_latency_us: float
    gather_share: float = 1.0
    """Rate of an all-gather or a reduce-scatter over that of an all-to-all."""
    contention: float = 0.0
    """Share by which compute slows while an exchange runs."""
    uncertainty: tuple[tuple[str, float], ...] = ()
    """Rate -> share by which it may be off."""

    @classmethod
    def of(cls, hardware: HardwareProfile, num_ranks: int) -> Self:
        """Return the rates of a group of `num_ranks`."""
        node = hardware.node
        within = node is not None and num_ranks <= node.num_ranks
        link = hardware.link_of(num_ranks)
        origins = {name: _kind(text) for name, text in hardware.origins.items()}
        if within:
            origins |= {"link_gb_per_s": "assumed", "link_latency_us": "assumed"}
        shares = {name: UNCERTAINTY.get(origins.get(name, ""), UNKNOWN) for name in CONSTANTS}
        if link.gather_share is None:  # one rate for all collectives: they are off together
            shares["gather_share"] = 0.0
        return cls(
            matmul_tflops=hardware.matmul_tflops,
            memory_gb_per_s=hardware.memory_gb_per_s,
            op_overhead_us=hardware.op_overhead_us,
            link_gb_per_s=link.gb_per_s,
            link_latency_us=link.latency_us,
            gather_share=link.gather_share or 1.0,
            contention=link.contention,
            uncertainty=tuple(shares.items()),
        )

    def compute_us(self, operations: float, nbytes: float, num_kernels: float) -> float:
        """Return the time of one operator: the slower of arithmetic and memory, and launches."""
        arithmetic = operations / (self.matmul_tflops * 1e12)
        memory = nbytes / (self.memory_gb_per_s * 1e9)
        return num_kernels * self.op_overhead_us + max(arithmetic, memory) * US_PER_S

    def link_us(self, nbytes: float, *, is_gather: bool = False) -> float:
        """Return the time of one exchange of so many bytes that leave a rank."""
        rate = self.link_gb_per_s * (self.gather_share if is_gather else 1.0)
        return self.link_latency_us + nbytes / (rate * 1e9) * US_PER_S

    def scaled(self, name: str, factor: float) -> Self:
        """Return the same with one constant `factor` times as large."""
        return replace(self, **{name: getattr(self, name) * factor})

    def moved(self) -> Iterator[Self]:
        """Return the rates with each constant moved up, then down, by its uncertainty."""
        for name, share in self.uncertainty:
            for factor in (1.0 + share, 1.0 - share):
                if share and getattr(self, name):
                    yield self.scaled(name, factor)


CONSTANTS: Final = tuple(f.name for f in fields(Rates) if f.name != "uncertainty")
"""Names of the rates that may be off."""


def _kind(origin: str) -> str:
    return origin.partition(":")[0].split(" ")[0]
