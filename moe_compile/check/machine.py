"""What the GPU and the software around it are, for the head of the results."""

from __future__ import annotations

import importlib.util
from typing import Any

import pynvml
import torch

from moe_compile.report.provenance import describe_machine


def describe_gpu_machine(device: str) -> dict[str, Any]:
    """Return hardware and versions; nothing is allocated on the device."""
    found = describe_machine()
    found["triton"] = importlib.util.find_spec("triton") is not None
    found["cuda"] = torch.version.cuda
    return {**found, **(_gpu() if device == "cuda" else {"gpu": "none: smoke run"})}


def _gpu() -> dict[str, Any]:
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        found = {
            "gpu": pynvml.nvmlDeviceGetName(handle),
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "memory_mb": pynvml.nvmlDeviceGetMemoryInfo(handle).total // 2**20,
            "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "max_sm_clock_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "power_limit_w": pynvml.nvmlDeviceGetPowerManagementLimit(handle) // 1000,
            "pcie": f"gen {pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)}, "
            f"{pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)} lanes, at rest",
        }
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return {"gpu": f"unknown: {error}"}
    return found
