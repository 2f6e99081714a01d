"""Inductor's settings off while it compiles a graph that our passes work on, with the reasons.

No fault, settings: each is off for the current compilation alone.

Contract
    Only settings that this torch has are named; torch's version is never read.
    Where nothing of ours runs on a graph, Inductor compiles it with the settings it has.

Why benchmarks are off
    To compare kernels Inductor runs them and waits for the whole device, which waits for every
    collective in flight. A collective ends when all its ranks have launched it; one of them may
    wait for another collective that this rank has not launched yet. Ranks then wait for ever
    (torchrec issue 4149: the benchmark of padded products, behind an all-to-all). Graphs
    are compiled while collectives are in flight whenever a backward graph is, or a new shape comes.
CUDA graphs, where they are asked for, are `cuda_graphs`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch._inductor.config as inductor_config

from moe_compile.torch_quirks.cuda_graphs import ASKED, capture_settings

REORDERINGS: Final[Mapping[str, object]] = {
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "reorder_for_locality_in_training": False,
    "reorder_for_compute_comm_overlap": False,
    "triton.reorder_for_reducing_graph_partitions": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
}
"""Settings that would move launches and waits from where the schedule put them."""

BENCHMARKS: Final[Mapping[str, object]] = {
    "shape_padding": False,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "benchmark_fusion": False,
    "combo_kernels_autotune": 0,
    "triton.autotune_pointwise": False,
    "triton.multi_kernel": 0,
}
"""Settings that run kernels to compare them, while compiling or at their first launch."""

ON_BY_DEFAULT: Final = frozenset(
    {*REORDERINGS, "shape_padding", "combo_kernels_autotune", "triton.autotune_pointwise"}
)
"""Settings of these that are on, in some torch, though nobody asked for them."""


def settings_of_ours(
    *, is_scheduled: bool, captured: Mapping[str, Any] | None = None
) -> dict[str, object]:
    """Return the `config_patches` of `compile_fx` for a graph that our passes work on.

    With `is_scheduled` Inductor keeps the order that the graph is in. Where it is to capture parts
    of the graph in CUDA graphs, `captured` are the user's settings.
    """
    known = inductor_config.get_config_copy()
    captures = {ASKED: False} if captured is None else capture_settings(captured)
    wanted = {**BENCHMARKS, **captures, **(REORDERINGS if is_scheduled else {})}
    return {key: value for key, value in wanted.items() if key in known}


def switched_off(patches: Mapping[str, Any], ours: Mapping[str, object]) -> tuple[str, ...]:
    """Return the settings that are on, in `patches` or for all, and that `ours` switch off."""
    known = inductor_config.get_config_copy()
    asked = {**{key: known.get(key) for key in ours if key not in ON_BY_DEFAULT}, **patches}
    return tuple(key for key, value in ours.items() if asked.get(key) and not value)
