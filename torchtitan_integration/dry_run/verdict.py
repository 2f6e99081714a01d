"""Does a job fit in the memory of its GPU? The verdict, in words and as data.

Contract
    The fullest rank decides. It fits where its sum leaves `NOT_COUNTED` for what is not counted.
    Where the job states a skew, the sum is that of the rank with most rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from moe_compile.errors import InvalidConfig
from moe_compile.hardware.profile import read_profile
from torchtitan_integration.dry_run.stages import StageMemory

GIB: Final = 2**30
NOT_COUNTED: Final = 5 * GIB
"""Assumed: CUDA's context and kernels 1, NCCL's other buffers 1, workspaces 1, a fragmented pool
2."""
MOST_CHANGES: Final = 3
"""Changes that a verdict names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of a GPU."""

    name: str
    """Name of the hardware profile."""
    total: int
    """Bytes of memory; 0 where the profile does not say."""

    def left(self, stages: Sequence[StageMemory]) -> int:
        """Return the bytes left on the fullest rank; below 0, those that are too much."""
        return self.total - NOT_COUNTED - max(stage.total for stage in stages)


def device_memory(hardware: str) -> DeviceMemory:
    """Return the memory of a GPU by its profile's name; data sheets say GB for GiB."""
    try:
        memory = read_profile(hardware).values.get("memory", {})
    except InvalidConfig:  # a profile that a function makes has no file
        memory = {}
    return DeviceMemory(name=hardware, total=int(memory.get("capacity_gb", 0.0) * GIB))


@dataclass(frozen=True, kw_only=True, slots=True)
class Helped:
    """A change to a job, and what it does to the fullest rank."""

    change: str
    """What to write."""
    saved: int
    """Bytes that the fullest rank needs less."""
    fits: bool
    """Whether the job fits with this change alone."""

    def __str__(self) -> str:
        """Return the change with its figure."""
        then = " (then it fits)" if self.fits else ""
        return f"{self.change}: {self.saved / GIB:.2f} GiB less{then}"


def skew_line(fullest: StageMemory) -> str:
    """Return what uneven routing means for the fullest rank."""
    busiest, more = fullest.busiest, fullest.more_rows / GIB
    if busiest.why_even:
        return f"All ranks have equally many rows: {busiest.why_even}."
    if not fullest.more_rows:
        return (
            f"Uneven routing changes no size that is counted on {fullest.place}: it has no block "
            "with experts, or its experts have a capacity, or rows have room of one size "
            '(host_reads = "none"), or tokens are all-gathered (dispatch = "all_gather"), and '
            "gathered rows are counted as even."
        )
    if not busiest.is_stated:
        return (
            "Routing is assumed even (megamoe.routing_skew = 0). If one rank gets twice its rows "
            f"in every layer, it needs {more:.2f} GiB more: {fullest.even / GIB + more:.2f} GiB "
            f"on {fullest.place}."
        )
    return (
        f"megamoe.routing_skew = {busiest.skew:g}: the rank with most rows has {busiest.times:.2f} "
        "times as many as with even routing, the same rank in every layer. They take "
        f"{more:.2f} GiB more: {fullest.total / GIB:.2f} GiB on {fullest.place}, "
        f"{fullest.even / GIB:.2f} GiB with even routing."
    )


def verdict(device: DeviceMemory, stages: Sequence[StageMemory], helped: Sequence[Helped]) -> str:
    """Return whether the job fits, by how much, and the changes that help most where it does not.

    `helped` are all changes that were looked at.
    """
    fullest, capacity = max(stages, key=lambda stage: stage.total), f"{device.total / GIB:g} GB"
    where, kept = f"the fullest rank ({fullest.place})", f"{NOT_COUNTED / GIB:.0f} GiB"
    if not device.total:
        return (
            f"not known whether it fits: the fullest rank ({fullest.place}) needs "
            f"{fullest.total / GIB:.2f} GiB and {kept} for what is not counted, and profile "
            f"{device.name!r} names no memory; write capacity_gb in its table [memory]"
        )
    left = device.left(stages)
    beside = f"{kept} are kept for CUDA, workspaces, NCCL's other buffers and the allocator"
    if left >= 0:
        return f"fits in {capacity}: {left / GIB:.2f} GiB left on {where}; {beside}"
    said = f"does not fit in {capacity}: {-left / GIB:.2f} GiB too much on {where}; {beside}."
    best = most_helpful(helped)
    if not best:
        return f"{said} No change of a single key was found that helps."
    return f"{said} These changes help most, each by itself: {'; '.join(map(str, best))}."


def most_helpful(helped: Sequence[Helped]) -> list[Helped]:
    """Return the changes that save most, the largest first."""
    useful = [one for one in helped if one.saved / GIB >= 0.005]  # less is printed as 0.00
    return sorted(useful, key=lambda one: -one.saved)[:MOST_CHANGES]


def memory_report(
    device: DeviceMemory, stages: Sequence[StageMemory], helped: Sequence[Helped]
) -> dict[str, Any]:
    """Return the table, the verdict and the changes as data, in bytes."""
    fullest = max(stages, key=lambda stage: stage.total)
    left = device.left(stages) if device.total else None
    return {
        "capacity": device.total or None,
        "kept_for_what_is_not_counted": NOT_COUNTED,
        "fits": None if left is None else left >= 0,
        "left_on_fullest_rank": left,
        "fullest_rank": fullest.name,
        "routing_skew": fullest.busiest.skew,
        "rows_of_busiest_rank_over_even": fullest.busiest.times,
        "rows_are_even_because": fullest.busiest.why_even,
        "ranks": [stage.as_json() for stage in stages],
        "changes": [{"change": one.change, "saved": one.saved, "fits": one.fits} for one in helped],
    }
