"""What the machine can do: rates the time estimates divide by.

Contract
    A profile is data: the same on every rank that names it, never measured on the spot.
    Which one holds is asked of NVML once, or said by the user; no GPU means the `cpu` profile.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import pynvml

from moe_compile.errors import InvalidConfig, nearest

PROFILES: Final = Path(__file__).parent / "profiles"


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    """Achievable rates of one device and of its link to the other ranks of a group."""

    name: str
    """What reports print."""
    matmul_tflops: float
    """Achieved matrix multiply rate, 1e12 floating-point operations per second."""
    memory_gb_per_s: float
    """Achieved device memory bandwidth, 1e9 bytes per second."""
    op_overhead_us: float
    """Fixed cost of one operator on the compute stream, microseconds."""
    link_gb_per_s: float
    """Bandwidth of an all-to-all per rank and direction, 1e9 bytes per second."""
    link_latency_us: float
    """Time of an empty all-to-all, microseconds."""

    def __post_init__(self) -> None:
        """Raise InvalidConfig for a rate that is not positive."""
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise InvalidConfig(
                    f"hardware profile {self.name!r}: {field.name} is {value!r}; write a number"
                )
        for name in ("matmul_tflops", "memory_gb_per_s", "link_gb_per_s"):
            if getattr(self, name) == 0:
                raise InvalidConfig(f"hardware profile {self.name!r}: {name} must be above 0")


def load_profile(name: str) -> HardwareProfile:
    """Return the profile called `name`, at the path `name`, or of this device for "detect".

    Raises InvalidConfig when there is no such profile or its fields are wrong.
    """
    if name == "detect":
        return _read(PROFILES / f"{_detected()}.toml")
    if name.endswith(".toml"):
        return _read(Path(name))
    return _read(PROFILES / f"{name}.toml")


def _read(path: Path) -> HardwareProfile:
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        known = [p.stem for p in PROFILES.glob("*.toml")]
        raise InvalidConfig(
            f"megamoe.hardware: no profile {str(path)!r}.{nearest(path.stem, ['detect', *known])}"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"megamoe.hardware: {path} is not TOML: {error}") from None
    wanted = {f.name for f in fields(HardwareProfile)}
    if wrong := sorted(wanted ^ set(table)):
        raise InvalidConfig(
            f"megamoe.hardware: {path} must have exactly {sorted(wanted)}; see {wrong}"
        )
    return HardwareProfile(**table)


@functools.cache
def _detected() -> str:
    """Name of the profile for this machine's first GPU; `cpu` without one."""
    try:
        pynvml.nvmlInit()
        try:
            device = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)).lower()
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return "cpu"
    return "h200" if "h200" in device else "h100"
