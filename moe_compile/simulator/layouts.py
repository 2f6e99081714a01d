"""One layer under each way to divide it, nothing overlapped: MegaScale-MoE figure 14."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from moe_compile.simulator import setups
from moe_compile.simulator.checks import RATIO, Check, Row
from moe_compile.simulator.layer_time import time_layer
from moe_compile.simulator.method import Attention, Experts, Method
from moe_compile.simulator.models import TABLE_2, ModelShape
from moe_compile.simulator.published import FIGURE_14_GAINS
from moe_compile.simulator.step import Setting

LAYOUTS: Final[Mapping[str, Method]] = {
    "TP + TP": Method(attention=Attention.HEADS, experts=Experts.SLICES),
    "TP + EP": Method(attention=Attention.HEADS),
    "SP + TP": Method(experts=Experts.SLICES),
    "SP + EP": Method(),
}
"""Attention, then experts: tensor (TP), sequence (SP), expert parallelism (EP)."""


def layout_gains(model: ModelShape) -> dict[str, float]:
    """Return the time of a layer under TP + TP over its time under each layout.

    Rows go to experts by all-to-all or all-gather, whichever is faster.
    """
    profile = setups.shipped("h800")
    times = {}
    for name, method in LAYOUTS.items():
        ways = (method, replace(method, gathers_rows=True))
        settings = (
            Setting(
                model=model,
                profile=profile,
                fit=profile.fit("bytedance"),
                method=way,
                job=setups.MEGASCALE_JOB,
            )
            for way in ways
        )
        times[name] = min(time_layer(setting.costs).total_us for setting in settings)
    return {name: times["TP + TP"] / us for name, us in times.items()}


def check_layouts() -> Check:
    """Return the least and the greatest gain of SP + EP over six models."""
    gains = sorted((layout_gains(model)["SP + EP"], model.name) for model in TABLE_2)
    return Check(
        title="SP + EP over TP + TP on 8 H800, nothing overlapped",
        source="MegaScale-MoE (arXiv 2505.11432) figure 14",
        constants="h800, fit bytedance",
        rows=tuple(
            Row(label=f"{label} of six models ({name})", unit=RATIO, published=gain, predicted=ours)
            for label, gain, (ours, name) in zip(
                ("least", "greatest"), FIGURE_14_GAINS, (gains[0], gains[-1]), strict=True
            )
        ),
    )
