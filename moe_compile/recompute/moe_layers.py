"""Layers of experts in a joint graph: from the tokens that are routed to the sum of their rows.

Contract
    A layer is known by the exchanges of its region, which `detect_regions` marks. Experts whose
    ranks exchange nothing are no layer here.

Pseudo-code
    launches of a region: dispatch, where no wait of the region comes before, and combine
    between = what depends on a wait of the region, and what a launch of it depends on
    tokens  = what the dispatch sends, before rows were gathered
    layer   = what depends on the tokens, up to a sum with something that does not: the residual;
              past the combine no norm, attention or product is of the layer either
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch.fx as fx

from moe_compile.cost.amounts import (
    CONCATENATION,
    FILLS,
    GATHERS,
    OWN_GATHERS,
    SCATTERS,
    is_elementwise,
    is_part,
    is_product,
)
from moe_compile.graph.launch_order import region_of
from moe_compile.graph.query import is_launch, is_wait, overload_name, tensor_of, waits_on
from moe_compile.regions.row_chain import shape_of

ROWS: Final = GATHERS | OWN_GATHERS
MAKES_ROWS: Final = SCATTERS | {CONCATENATION, "constant_pad_nd", "clone", "quantize_pack"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MoELayer:
    """One layer of experts."""

    between: frozenset[fx.Node]
    """Nodes between dispatch and combine."""
    nodes: frozenset[fx.Node]
    """All nodes of the layer."""


def moe_layers(nodes: Sequence[fx.Node], stops: Collection[fx.Node]) -> tuple[MoELayer, ...]:
    """Return the layers among the forward `nodes` of a joint graph.

    Past a combine no layer has a node of `stops`; a region with one between its exchanges is none.
    """
    launches: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if is_launch(node) and (region := region_of(node)) and _sends_rows(node):
            launches.setdefault(region, []).append(node)
    found = (_layer(nodes, each, stops) for each in launches.values())
    return tuple(one for one in found if one is not None)


def ancestors(nodes: Sequence[fx.Node], of: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes, inputs included, that those of `of` depend on, and these themselves."""
    found = set(of)
    for node in reversed(nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return found


def _descendants(nodes: Sequence[fx.Node], of: Iterable[fx.Node]) -> set[fx.Node]:
    found = set(of)
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _sends_rows(launch: fx.Node) -> bool:
    """Whether a collective sends rows of several numbers, not counts or scores."""
    sent = tensor_of(launch.all_input_nodes[0])
    is_matrix = sent is not None and sent.dim() > 1 and sent.shape[-1] != 1
    return is_matrix and (_is_number(sent) or (sent is not None and sent.element_size() == 1))


def _is_number(tensor: object) -> bool:
    return bool(getattr(tensor, "is_floating_point", bool)())


def _layer(
    nodes: Sequence[fx.Node], launches: Sequence[fx.Node], stops: Collection[fx.Node]
) -> MoELayer | None:
    waits = {wait for launch in launches for wait in waits_on(launch)}
    after = _descendants(nodes, waits)
    dispatches = [launch for launch in launches if launch not in after]
    back = {w for n in launches if n in after for w in waits_on(n)}
    between = (after & ancestors(nodes, launches)) - {*launches} - waits
    if not back or not between.isdisjoint(stops):
        return None
    tokens = {_tokens(launch.all_input_nodes[0]) for launch in dispatches}
    return MoELayer(
        between=frozenset(between), nodes=frozenset(_inside(nodes, tokens, back, stops))
    )


def _tokens(sent: fx.Node) -> fx.Node:
    """Return the tokens whose rows a dispatch sends."""
    node, are_rows = sent, True
    while True:
        op = overload_name(node).rpartition("::")[2]
        whole = [n for n in node.all_input_nodes if _is_number(tensor_of(n))]
        if is_part(node) or is_wait(node) or is_launch(node):
            whole = node.all_input_nodes[:1]
        elif are_rows and is_elementwise(node):
            whole = [n for n in whole if shape_of(n) == shape_of(node)]
        elif op not in ROWS and not (are_rows and op in MAKES_ROWS):
            return node
        filled = [n for n in whole if overload_name(n).rpartition("::")[2] in FILLS]
        sources = [n for n in whole if n not in filled]
        if not sources:
            return node
        are_rows = are_rows and op not in ROWS
        node = sources[0]


def _inside(
    nodes: Sequence[fx.Node],
    tokens: Collection[fx.Node],
    back: Collection[fx.Node],
    stops: Collection[fx.Node],
) -> set[fx.Node]:
    """Return the nodes from `tokens` to the result; `back` are the waits of the combine."""
    inside, late = set[fx.Node](), set[fx.Node]()
    for node in nodes:
        if inside.isdisjoint(node.all_input_nodes) and not (set(node.all_input_nodes) & {*tokens}):
            continue
        if node in tokens:
            continue
        is_late = node in back or not late.isdisjoint(node.all_input_nodes)
        if is_late and (is_product(node) or node in stops or _adds(node, inside)):
            continue
        inside.add(node)
        if is_late:
            late.add(node)
    return inside & ancestors(nodes, late)


def _adds(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    """Whether the node combines elements of the layer with those of another tensor."""
    others = (n for n in node.all_input_nodes if n not in inside and tensor_of(n) is not None)
    return is_elementwise(node) and any(shape_of(n) == shape_of(node) for n in others)
