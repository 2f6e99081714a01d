"""A hardware profile with one of its constants off, for decisions that are to stand all the same.

Contract
    A function of the profile: the same profiles in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from moe_compile.cost.rates import share_off
from moe_compile.hardware.host import NO_HOST
from moe_compile.hardware.profile import RATES, HardwareProfile

OF_NODE: Final = ("gb_per_s", "latency_us")


def perturbed_profiles(hardware: HardwareProfile) -> Iterator[HardwareProfile]:
    """Yield `hardware` with each constant above zero up, then down, by how far it may be off.

    What the host takes is off as a whole: another processor, another Python.
    """
    for name in RATES:
        for factor in _factors(hardware.origins.get(name, "")):
            if value := getattr(hardware, name):
                yield replace(hardware, **{name: value * factor})
    if hardware.host != NO_HOST:
        for factor in _factors("assumed"):
            yield replace(hardware, host=hardware.host.scaled(factor))
    yield from _with_other_nodes(hardware)


def _with_other_nodes(hardware: HardwareProfile) -> Iterator[HardwareProfile]:
    if (node := hardware.node) is None:
        return
    for name in OF_NODE:
        for factor in _factors("assumed"):
            if value := getattr(node, name):
                yield replace(hardware, node=replace(node, **{name: value * factor}))


def _factors(origin: str) -> tuple[float, float]:
    """Return what multiplies a number up, then down, by how far one of this origin may be off."""
    share = share_off(origin)
    return 1.0 + share, 1.0 - share
