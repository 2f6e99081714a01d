"""A hash of the passes' decisions, which ranks compare before they run.

Contract
    Covers decisions, the options that change code, and the collectives to run; no prose of a
    report, no predicted time, no name of a hardware profile.

It also covers which collectives send one input of the program and nothing else that needs a
gradient. This is read off a Dynamo graph before its backward is derived: off its nodes and which
of them need gradients, never off sizes. The gradient of such an input is the result of the
collective's backward, or a function of it; any other goes on into the backward of other operators.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.launch_order import dependences, products
from moe_compile.graph.query import has_gradient, is_launch
from moe_compile.plan.state import CompileState

SAYS_NOTHING: Final = frozenset(
    {"report", "strict", "hardware", "step_peak_bytes", "routing_skew", "measure_waits"}
)
"""Options that change no launch: where and how reports are made, and the sources of prices.
Decisions made by price are in the hash themselves."""


def level_value(graph: fx.Graph, state: CompileState, *, dropped: Iterable[str]) -> dict[str, Any]:
    """Return the decisions of one graph's Dynamo-level passes, and facts of the `graph` they left.

    `dropped` has the names of passes left out.
    Where ranks promise equal sizes the order of launches follows from all dependences between them,
    and in parts of the batch from the products there are.
    Which gradients are sent in another format is decided in the later backward graph. It follows
    from where they go, and so from the inputs that collectives send.
    """
    are_gradients_sent_otherwise = state.config.gradient_wire != "same"
    return {
        "plan": state.plan,
        "refused": [other.reason.name for other in state.found.others if other.is_region],
        "dropped": sorted(dropped),
        "dependences": dependences(graph) if state.config.equal_tokens else [],
        "products": products(graph) if state.config.equal_tokens and state.num_parts > 1 else [],
        "one_input": send_one_input(graph) if are_gradients_sent_otherwise else [],
    }


def plan_digest(
    config: MegaMoEConfig, levels: list[dict[str, Any]], collectives: Mapping[str, Sequence[str]]
) -> str:
    """Return a hash of the decisions, the options that change code, and the collectives to run.

    `collectives` are by process group, groups in the order of the graph. Their place in it is their
    name in the hash, since groups of one axis have other names on other ranks.
    """
    options = {f.name: getattr(config, f.name) for f in fields(config)}
    options = {name: value for name, value in options.items() if name not in SAYS_NOTHING}
    number = {group: i for i, group in enumerate(collectives)}
    found = [level | {"plan": level["plan"].value(number)} for level in levels]
    text = json.dumps([options, found, list(collectives.values())], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()


def groups_rewritten(state: CompileState, collectives: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the process groups whose launches a rewritten program may have changed.

    Those of exchanges, which are chunked, reordered or saved; and those whose collectives may pass
    one another, or have their gradients sent in another format. A rewrite of anything but a region
    may have moved any of them.
    """
    if state.config.gradient_wire != "same" or state.has_outside_rewrites:
        return set(collectives)
    may_pass = state.config.equal_tokens and state.config.schedule
    return {
        group
        for group, launched in collectives.items()
        if any("all_to_all" in one for one in launched) or (may_pass and len(launched) > 1)
    }


def send_one_input(graph: fx.Graph) -> list[bool]:
    """Return, for each launch, whether it has a gradient for one input of the graph alone."""
    return [_sends_one_input(node) for node in graph.nodes if is_launch(node)]


def _sends_one_input(launch: fx.Node) -> bool:
    node, sources = launch, [launch]
    while len(sources) == 1:
        (node,) = sources
        sources = [source for source in node.all_input_nodes if has_gradient(source)]
    return not sources and node.op in ("placeholder", "get_attr")
