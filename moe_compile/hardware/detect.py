"""Which profile is this machine's, by what NVML calls its first GPU.

Contract
    Once ranks agreed on one profile, that is the answer on all of them.
"""

from __future__ import annotations

import functools
from typing import Final

import pynvml

CHIPS: Final = ("h200", "h800", "h100", "a100")
"""Profiles named as NVML names the chip, in lower case."""
UNKNOWN_CHIP: Final = "h100"
"""Profile of a GPU that none is named after."""
NO_GPU: Final = "cpu"


def profile_of_chip(device_name: str) -> str:
    """Return the profile for what NVML calls a GPU."""
    found = (chip for chip in CHIPS if chip in device_name.lower())
    return next(found, UNKNOWN_CHIP)


class _Agreed:
    """The profile that all ranks of the job plan by; "" while they have not agreed."""

    name: str = ""


def agree_on_profile(name: str) -> None:
    """From now on answer `name`: what all ranks of the job agreed on."""
    _Agreed.name = name


def detected_profile() -> str:
    """Return the name of the profile ranks agreed on, else of the one for this machine."""
    return _Agreed.name or own_profile()


@functools.cache
def own_profile() -> str:
    """Return the name of the profile for this machine's first GPU; `cpu` without one."""
    try:
        pynvml.nvmlInit()
        try:
            return profile_of_chip(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return NO_GPU
