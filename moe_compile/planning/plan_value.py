"""What the passes decided, as a value that ranks compare.

Contract
    Decisions only: no prose of a report, no predicted time, no name of a hardware profile. Ranks
    that rewrite alike have equal values, whatever their GPUs are called and wherever in the
    source their layers stand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

import torch.fx as fx

from moe_compile.analysis.attention_regions import UNPROVEN
from moe_compile.analysis.gradient_sources import send_one_input
from moe_compile.analysis.regions import Refused
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.launch_order import dependences
from moe_compile.planning.async_tp import AsyncTP
from moe_compile.planning.state import AttentionVerdict, CompileState, RegionPlan

SAYS_NOTHING: Final = frozenset({"report", "strict", "hardware", "step_peak_bytes"})
"""Options that change no launch: where and how reports are made, and what prices are taken from.
What is decided by price is among the decisions themselves."""


def level_value(
    graph: fx.Graph, state: CompileState, *, chunked: Collection[str], dropped: Iterable[str]
) -> dict[str, Any]:
    """Return what one graph's Dynamo-level passes decided, and how they left `graph`.

    `chunked` has the names of regions that were replayed, `dropped` those of passes left out.
    Where ranks promise equal sizes the order of launches follows from all dependences between them.
    Which gradients are sent otherwise is decided in the backward graph, which comes later: by
    where these go, which follows from what the collectives send.
    """
    are_gradients_sent_otherwise = state.config.gradient_wire != "same"
    return {
        "regions": [_region(p, is_chunked=p.region.name in chunked) for p in state.plans],
        "refused": [d.reason.name for d in state.decoys if d.is_region],
        "attention": [_attention(verdict) for verdict in state.attention],
        "dropped": sorted(dropped),
        "dependences": dependences(graph) if state.config.equal_tokens else [],
        "one_input": send_one_input(graph) if are_gradients_sent_otherwise else [],
    }


def plan_digest(
    config: MegaMoEConfig, levels: list[dict[str, Any]], collectives: Mapping[str, Sequence[str]]
) -> str:
    """Return a hash of the decisions, the options that change code, and the collectives to run.

    `collectives` are by process group, groups in the order of the graph: by that order they are
    called, since groups of one axis have other names on other ranks.
    """
    options = {f.name: getattr(config, f.name) for f in fields(config)}
    options = {name: value for name, value in options.items() if name not in SAYS_NOTHING}
    number = {group: i for i, group in enumerate(collectives)}
    found = [_by_number(level, number) for level in levels]
    text = json.dumps([options, found, list(collectives.values())], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()


def groups_rewritten(state: CompileState, collectives: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the process groups on which a rewritten program may launch anything but as written.

    Those of exchanges, which are chunked, reordered or saved; and those whose collectives may pass
    one another, or have their gradients sent otherwise, or are handed to Inductor.
    """
    if state.config.gradient_wire != "same" or state.async_tp:
        return set(collectives)
    may_pass = state.config.equal_tokens and state.config.schedule
    return {
        group
        for group, launched in collectives.items()
        if any("all_to_all" in one for one in launched) or (may_pass and len(launched) > 1)
    }


def _by_number(level: dict[str, Any], number: Mapping[str, int]) -> dict[str, Any]:
    """Return what `level_value` says with numbers of process groups instead of their names."""
    return level | {
        kind: [found | {"group": number.get(found["group"])} for found in level[kind]]
        for kind in ("regions", "attention")
    }


def _region(plan: RegionPlan, *, is_chunked: bool) -> dict[str, Any]:
    switch = plan.switch
    return {
        "group": plan.region.group,
        "num_ranks": plan.region.num_ranks,
        "num_local_experts": plan.region.num_local_experts,
        "num_chunks": plan.num_chunks if is_chunked or switch.is_switched else 1,
        "is_chunked": is_chunked,
        "is_switched": switch.is_switched,
        "is_exact": switch.is_exact,
        "num_tokens": switch.num_tokens,  # all ranks gather as many
        "rows_per_token": switch.rows_per_token,
        "wires": [plan.dispatch.wire, plan.combine.wire],
        "refused": plan.proof.reason.name if isinstance(plan.proof, Refused) else "",
    }


def _attention(found: AttentionVerdict) -> dict[str, Any]:
    return {
        "group": found.group,
        "num_chunks": found.num_chunks,
        "unproven": found.reason.name if found.reason in UNPROVEN else "",
        "projections_cut": list(found.projections_cut),
        "is_handed_over": found.async_tp == AsyncTP.HANDED.value,
    }
