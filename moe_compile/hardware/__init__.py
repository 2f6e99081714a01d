"""What machines can do: profiles with origins, read from files, and NVML's account of this one."""

from moe_compile.hardware.links import GroupLink
from moe_compile.hardware.profile import PROFILES, HardwareProfile, load_profile

__all__ = ["PROFILES", "GroupLink", "HardwareProfile", "load_profile"]
