"""A hardware profile with one of its constants off, for decisions that are to stand all the same.

Contract
    A function of the profile: the same profiles in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from moe_compile.cost.rates import share_off
from moe_compile.hardware.profile import RATES, HardwareProfile

OF_NODE: Final = ("gb_per_s", "latency_us")


def perturbed_profiles(hardware: HardwareProfile) -> Iterator[HardwareProfile]:
    """Yield `hardware` with each constant above zero up, then down, by how far it may be off."""
    for name in RATES:
        share = share_off(hardware.origins.get(name, ""))
        for factor in (1.0 + share, 1.0 - share):
            if value := getattr(hardware, name):
                yield replace(hardware, **{name: value * factor})
    if (node := hardware.node) is None:
        return
    for name in OF_NODE:
        share = share_off("assumed")
        for factor in (1.0 + share, 1.0 - share):
            if value := getattr(node, name):
                yield replace(hardware, node=replace(node, **{name: value * factor}))
