"""What the host takes to keep a device busy: reads, integers, launches, kernels.

Contract
    Of the thread that runs compiled code, microseconds. All zero where the host is the device, or
    is taken to run ahead of it for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Self

from moe_compile.errors import InvalidConfig
from moe_compile.hardware.sourced_file import SourcedFile

TABLE: Final = "host"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCosts:
    """Microseconds of the host."""

    read_us: float = 0.0
    """Of a read of the device, once all that was queued before it is done."""
    integer_us: float = 0.0
    """Of one integer that compiled code takes out of what was read."""
    launch_us: float = 0.0
    """Of a collective, and of an all-to-all besides."""
    launch_us_per_rank: float = 0.0
    """Of an all-to-all, for each rank of its group: two sizes, a send and a receive."""
    kernel_us: float = 0.0
    """Of one kernel that compiled code launches."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Number -> where it comes from; complete when it was loaded."""

    def scaled(self, factor: float) -> Self:
        """Return the same of a host that takes `factor` times as long."""
        return replace(self, **{name: getattr(self, name) * factor for name in NUMBERS})


NUMBERS: Final = tuple(f.name for f in fields(HostCosts) if f.name != "origins")

NO_HOST: Final = HostCosts()


def host_in(file: SourcedFile) -> HostCosts:
    """Return the costs that a profile's file states; none where it has no such table.

    Raises InvalidConfig where the table lacks a number, or has another.
    """
    table = file.values.get(TABLE)
    if table is None:
        return NO_HOST
    if wrong := sorted(set(NUMBERS) ^ set(table)):
        raise InvalidConfig(
            f"megamoe.hardware: {file.path}: table {TABLE} must have exactly {sorted(NUMBERS)}; "
            f"see {wrong}"
        )
    origins = {name: file.origins[f"{TABLE}.{name}"] for name in NUMBERS}
    return HostCosts(**{name: float(table[name]) for name in NUMBERS}, origins=origins)


def host_table(host: HostCosts) -> dict[str, Any]:
    """Return the table of these costs, its numbers beside their origins, for `dump_sourced`."""
    return {
        name: {"value": getattr(host, name), "origin": host.origins.get(name)} for name in NUMBERS
    }
