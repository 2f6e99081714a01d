"""How large everything is: on GPUs, and in the smoke run on processors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """One run of the check."""

    device: str
    collective_timeout_s: float
    """After which a collective is taken to hang; ranks may compile for as long."""
    programs: tuple[str, ...]
    """Of section `bits`; () for all."""


GPUS: Final = Sizes(device="cuda", collective_timeout_s=90.0, programs=())
SMOKE: Final = Sizes(
    device="cpu",
    collective_timeout_s=180.0,
    programs=("chunks by load", "attention by heads", "a rank without tokens", "two hops"),
)
SIZES: Final[Mapping[str, Sizes]] = {"cuda": GPUS, "cpu": SMOKE}

PROMISED_S: Final[Mapping[str, float]] = {"bits": 480.0}
"""Seconds of each section, in the order they run: of what is left, a section gets its part among
those still to come."""
