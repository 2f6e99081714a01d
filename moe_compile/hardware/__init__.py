"""Rates of machines: profiles with origins, read from files, and NVML's account of this one."""

from moe_compile.hardware.links import Link
from moe_compile.hardware.profile import PROFILES, HardwareProfile, load_profile

__all__ = ["PROFILES", "HardwareProfile", "Link", "load_profile"]
