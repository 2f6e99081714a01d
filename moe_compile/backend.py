"""The door: `torch.compile(model, backend="megamoe")`.

Contract
    Without a MoE region, or attention between exchanges, the graph goes to Inductor as it came:
    same code, same cache keys. Only `gradient_wire` concerns such graphs too.
    torch's configuration is changed only inside our own compilations, with one exception made
    at import: `torch._dynamo.config.capture_scalar_outputs`, without which Dynamo would break
    the graph at the split sizes before any backend sees it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch._dynamo
import torch._inductor
import torch.distributed as dist
import torch.fx as fx
from torch._logging import trace_structured

from moe_compile.analysis.regions import Refused
from moe_compile.codegen import compile_with_fx, compile_with_inductor
from moe_compile.config import MegaMoEConfig, from_sources, split_options
from moe_compile.errors import InvalidConfig, RegionRefused
from moe_compile.hardware import load_profile
from moe_compile.planning.state import CompileState
from moe_compile.report.compilations import Compilation, describe
from moe_compile.report.process_report import REPORT
from passes.pipeline import DYNAMO, check_names, run_level

LOG: Final = logging.getLogger(__name__)

torch._dynamo.config.capture_scalar_outputs = True


def megamoe(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph; the entry point `torch_dynamo_backends` names this function.

    `options` with the prefix `megamoe.` are ours, all others go to Inductor, as `mode` does.
    Raises InvalidConfig for an unknown option or value; RegionRefused when `strict` and a region
    could not be transformed.
    """
    ours, inductor = split_options(options or {})
    config = from_sources(options=ours, environment=os.environ)
    check_names(config.disable_passes)
    patches = {**_mode_patches(mode), **inductor}
    state, compilation = rewrite(gm, config)
    if compilation.has_regions:
        REPORT.add(compilation, config.report, state.hardware.name)
        _log(compilation)
    compile_graph = compile_with_fx if config.codegen == "fx" else compile_with_inductor
    return compile_graph(gm, example_inputs, state, patches, has_regions=compilation.has_regions)


def rewrite(gm: fx.GraphModule, config: MegaMoEConfig) -> tuple[CompileState, Compilation]:
    """Run the Dynamo-level passes on `gm` in place; return what later levels and reports need."""
    state = CompileState(config=config, hardware=load_profile(config.hardware))
    compilation = describe(gm, state)
    _run_dynamo_level(gm, state, compilation)
    state.family = compilation.family
    nums = [r.num_chunks for r in compilation.regions]
    nums += [a.num_chunks for a in compilation.attention]
    state.is_chunked = any(num > 1 for num in nums)
    state.plan_digest = compilation.plan_digest()
    return state, compilation


def _run_dynamo_level(gm: fx.GraphModule, state: CompileState, compilation: Compilation) -> None:
    """Run on `gm`, then on what bodies of higher-order operators, as checkpointing's, it has."""
    results = run_level(DYNAMO, gm.graph, state)
    _check_groups(state)
    _refuse_if_strict(state.config, state)
    compilation.add_level(results, state)
    gm.recompile()
    for body in gm.children():
        if isinstance(body, fx.GraphModule):
            _run_dynamo_level(body, state, compilation)


def _mode_patches(mode: str | None) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    try:
        return dict(torch._inductor.list_mode_options(mode))
    except (RuntimeError, KeyError) as error:
        raise InvalidConfig(f"torch.compile mode {mode!r}: {error}") from None


def _check_groups(state: CompileState) -> None:
    """Raise InvalidConfig when a region exchanges over a process group that does not exist."""
    found = [(plan.where, plan.region.group) for plan in state.plans]
    found += [(a.where, a.group) for a in state.attention if a.is_region]
    for where, group in found:
        try:
            dist.distributed_c10d._resolve_process_group(group)
        except (RuntimeError, ValueError, KeyError):
            raise InvalidConfig(
                f"the exchange at {where} uses process group {group!r}, which "
                "does not exist in this process: call torch.distributed.init_process_group, and "
                "make the group on every rank, before the compiled model runs"
            ) from None


def _log(compilation: Compilation) -> None:
    chunks = [region.num_chunks for region in compilation.regions]
    LOG.info("%s: %d MoE regions in %s chunks", compilation.family, len(chunks), chunks)
    groups = [a.num_chunks for a in compilation.attention if a.is_region]
    LOG.info("%s: %d attention regions in %s chunks", compilation.family, len(groups), groups)
    for line in (*compilation.left_alone, *compilation.dropped):
        LOG.debug("%s: left alone: %s", compilation.family, line)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "megamoe_report", "encoding": "json"},
        payload_fn=lambda: json.dumps(dataclasses.asdict(compilation)),
    )


def _refuse_if_strict(config: MegaMoEConfig, state: CompileState) -> None:
    if not config.strict:
        return
    for plan in state.plans:
        for exchange in (plan.dispatch, plan.combine):
            if exchange.refusal:
                raise RegionRefused(
                    f"the {exchange.name} of {plan.region.name} is not quantised: "
                    f"{exchange.refusal}. Set megamoe.{exchange.name}_wire = 'same'"
                )
        if config.dispatch == "all_gather" and not plan.switch.is_switched:
            why = f"{plan.switch.reason.value} ({plan.switch.detail})"
            raise RegionRefused(
                f"{plan.region.name} is not all-gathered: {why}. "
                "Set megamoe.dispatch = 'all_to_all' or megamoe.strict = False"
            )
    if config.chunks == 1:
        return
    unproven = [plan.proof for plan in state.plans if isinstance(plan.proof, Refused)]
    for refused in (*unproven, *(decoy for decoy in state.decoys if decoy.is_region)):
        raise RegionRefused(
            f"{refused.candidate} is not chunked: {refused.reason.value} ({refused.detail}). "
            "Set megamoe.strict = False to run it as it is"
        )
