"""The profile for this machine, by NVML's name of its first GPU.

Contract
    Once ranks agreed on one profile, it is the answer on all of them.
    No GPU is silently taken for another. A profile that stands in for a GPU without one of its own
    is warned of, once per process; where none can stand in, that is an error.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pynvml

from moe_compile.errors import InvalidConfig

LOG: Final = logging.getLogger(__name__)
CHIPS: Final = ("a100", "b200", "gb200", "h100", "h20", "h200", "h800")
"""Profiles named after chips, in lower case. Names match as whole words: GH200 is no H200."""
STANDS_IN: Final[Mapping[int, str]] = {8: "a100", 9: "h100", 10: "b200", 12: "a100"}
"""Major compute capability -> stand-in profile for a GPU that none is named after. GPUs of
workstations (12) have the memory and the links of an A100 rather than a B200's."""
OTHER_BOARDS: Final = frozenset({"pcie", "nvl"})
"""Words in a GPU's name for boards without NVLink switches; profiles describe boards with them."""
NO_GPU: Final = "cpu"
TO_DO: Final = (
    "To do: measure this GPU by megamoe calibrate mine.toml --start {start}, write the rates of "
    "its links (NVLink, network) into the file, and set megamoe.hardware = 'mine.toml'; or set "
    "megamoe.hardware to the name of a profile"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Detected:
    """The profile for a GPU."""

    profile: str
    """Name of the profile; "" where none can stand in."""
    warning: str = ""
    """Differences between this GPU and the profile; "" where the profile is this GPU's."""


def profile_of_chip(device_name: str, generation: int | None) -> Detected:
    """Return the profile for a GPU by NVML's name; `generation` is its major compute capability."""
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    for chip in CHIPS:
        if chip in words:
            return Detected(profile=chip, warning=_other_board(device_name, words, chip))
    start = STANDS_IN.get(generation or 0, "")
    why = f"no profile has the name of this GPU, {device_name!r}"
    if not start:
        to_do = TO_DO.format(start=STANDS_IN[9])
        return Detected(profile="", warning=f"{why}, and none can stand in for it. {to_do}")
    why += (
        f": {start} is used for it, but the rates and links of this profile may be far from those "
        "of the GPU"
    )
    return Detected(profile=start, warning=f"{why}. {TO_DO.format(start=start)}")


def _other_board(device_name: str, words: list[str], chip: str) -> str:
    if not OTHER_BOARDS.intersection(words):
        return ""
    why = f"profile {chip} is used for {device_name!r}, but this profile describes a board with"
    return f"{why} NVLink switches, which has other clocks and links. {TO_DO.format(start=chip)}"


class _Agreed:
    """The profile that all ranks of the job plan by; "" while they have not agreed."""

    name: str = ""


def agree_on_profile(name: str) -> None:
    """From now on answer `name`, the profile that all ranks of the job agreed on."""
    _Agreed.name = name


def detected_profile() -> str:
    """Return the name of the profile ranks agreed on; before that, of the one for this machine.

    Raises InvalidConfig where none can stand in for this machine's GPU.
    """
    return _Agreed.name or own_profile()


@functools.cache
def own_profile() -> str:
    """Return the name of the profile for this machine's first GPU; `cpu` without one.

    Raises InvalidConfig where none can stand in for it.
    """
    found = _detect(pynvml)
    if not found.profile:
        raise InvalidConfig(f"megamoe.hardware = 'detect': {found.warning}")
    if found.warning:
        LOG.warning("megamoe: %s", found.warning)
    return found.profile


def _detect(nvml: Any) -> Detected:
    try:
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(0)
            generation, _ = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            return profile_of_chip(str(nvml.nvmlDeviceGetName(handle)), int(generation))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return _without_nvml(sys.modules.get("torch"))


def _without_nvml(torch: Any) -> Detected:
    """Return the processor's profile, unless `torch`, where it was imported, runs on a GPU."""
    if torch is None or not torch.cuda.is_available():
        return Detected(profile=NO_GPU)
    name = torch.cuda.get_device_name()
    why = f"torch runs on {name!r}, which NVML does not list, and all profiles are of NVIDIA GPUs"
    return Detected(profile="", warning=f"{why}. {TO_DO.format(start=STANDS_IN[9])}")
