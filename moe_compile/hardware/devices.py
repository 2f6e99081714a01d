"""NVML's description of this machine's GPUs; nothing is changed or run.

Contract
    Only questions that change nothing are asked. A question that a driver or a chip does not answer
    gives None; no driver at all is a message, not an error.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

import pynvml

MB_PER_GB: Final = 1e3
FABRIC_STATES: Final = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
THROTTLING: Final = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that make kernels slower than the chip allows."""
SETTINGS: Final = {0x01: "idle", 0x02: "clocks set by a user", 0x100: "display clocks"}
"""Bits that explain the clocks and slow no kernel."""
PCIE_GB_PER_S_PER_LANE: Final = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""PCIe generation -> 1e9 bytes per second of one lane and direction, encoding taken off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU as NVML describes it; None for questions without an answer."""

    index: int
    name: str
    memory_gb: float | None
    generation: int | None
    """Major compute capability."""
    is_mig: bool | None
    """Whether the GPU is cut into slices."""
    nvlink_count: int
    """Active links."""
    nvlink_gb_per_s: float | None
    """Rate of one link and direction, as its speed is set."""
    fabric_state: str | None
    fabric_clique: int | None
    """Number of the GPU's clique, whose GPUs reach one another by NVLink, across nodes perhaps."""
    pcie_generation: int | None
    """The link's highest generation: it idles at a lower one."""
    pcie_lanes: int | None
    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    clock_reasons: tuple[str, ...]
    """Reasons for the clocks as they are now."""
    throttling: tuple[str, ...]
    """Those of the reasons that slow kernels."""

    @property
    def nvlink_total_gb_per_s(self) -> float:
        """Return the rate of all NVLinks, one direction; 0 without any."""
        return self.nvlink_count * (self.nvlink_gb_per_s or 0.0)

    @property
    def pcie_gb_per_s(self) -> float:
        """Return the rate of PCIe, one direction; 0 when unknown."""
        lane = PCIE_GB_PER_S_PER_LANE.get(self.pcie_generation or 0, 0.0)
        return lane * (self.pcie_lanes or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """All GPUs that NVML shows."""

    devices: tuple[Device, ...]
    driver: str
    message: str = ""
    """Why there are no devices."""


def read_machine(nvml: Any = pynvml) -> Machine:
    """Return the machine that `nvml` describes; without an answer, no devices and a message."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Machine(devices=(), driver="", message=f"NVML is not available: {error}")
    asked = _Asked(nvml)
    try:
        driver = asked.answer("nvmlSystemGetDriverVersion") or ""
        count = asked.answer("nvmlDeviceGetCount") or 0
        devices = tuple(asked.device(index) for index in range(count))
    finally:
        nvml.nvmlShutdown()
    return Machine(devices=devices, driver=driver, message="" if devices else "NVML shows no GPU")


@dataclass(frozen=True, slots=True)
class _Asked:
    nvml: Any

    def answer(self, function: str, *arguments: Any) -> Any:
        """Return the answer; None when the library, driver or chip has none."""
        call = getattr(self.nvml, function, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self.nvml.NVMLError:
            return None

    def device(self, index: int) -> Device:
        handle = self.nvml.nvmlDeviceGetHandleByIndex(index)
        memory = self.answer("nvmlDeviceGetMemoryInfo", handle)
        mig = self.answer("nvmlDeviceGetMigMode", handle)
        capability = self.answer("nvmlDeviceGetCudaComputeCapability", handle)
        links = self._active_links(handle)
        state, clique = self._fabric(handle)
        reasons = self._clock_reasons(handle)
        return Device(
            index=index,
            name=str(self.nvml.nvmlDeviceGetName(handle)),
            memory_gb=None if memory is None else memory.total / 1e9,
            generation=None if capability is None else int(capability[0]),
            is_mig=None if mig is None else bool(mig[0]),
            nvlink_count=len(links),
            nvlink_gb_per_s=self._link_gb_per_s(handle, links),
            fabric_state=state,
            fabric_clique=clique,
            pcie_generation=self.answer("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            pcie_lanes=self.answer("nvmlDeviceGetMaxPcieLinkWidth", handle),
            sm_clock_mhz=self._clock(handle, "nvmlDeviceGetClockInfo"),
            max_sm_clock_mhz=self._clock(handle, "nvmlDeviceGetMaxClockInfo"),
            clock_reasons=_named(reasons, {**SETTINGS, **THROTTLING}),
            throttling=_named(reasons, THROTTLING),
        )

    def _active_links(self, handle: Any) -> list[int]:
        most = getattr(self.nvml, "NVML_NVLINK_MAX_LINKS", 0)
        return [i for i in range(most) if self.answer("nvmlDeviceGetNvLinkState", handle, i)]

    def _link_gb_per_s(self, handle: Any, links: list[int]) -> float | None:
        field = getattr(self.nvml, "NVML_FI_DEV_NVLINK_GET_SPEED", None)
        if not links or field is None:
            return None
        values = self.answer("nvmlDeviceGetFieldValues", handle, [(field, links[0])])
        if values is None or values[0].nvmlReturn != self.nvml.NVML_SUCCESS:
            return None
        return float(values[0].value.uiVal) / MB_PER_GB

    def _fabric(self, handle: Any) -> tuple[str | None, int | None]:
        layout = getattr(self.nvml, "c_nvmlGpuFabricInfoV_t", None)
        if layout is None:
            return None, None
        info = layout()
        if self.answer("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info)) is None:
            return None, None
        return FABRIC_STATES.get(info.state, "unknown"), info.cliqueId

    def _clock(self, handle: Any, function: str) -> int | None:
        value = self.answer(function, handle, self.nvml.NVML_CLOCK_SM)
        return None if value is None else int(value)

    def _clock_reasons(self, handle: Any) -> int:
        names = (
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        )
        answers = (self.answer(name, handle) for name in names)
        return int(next((a for a in answers if a is not None), 0))


def _named(bits: int, names: dict[int, str]) -> tuple[str, ...]:
    return tuple(name for bit, name in names.items() if bits & bit)
