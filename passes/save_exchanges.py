"""Keep the results of exchanges for the backward pass, whatever activation checkpointing says.

Contract
    Requires  FUNCTIONAL.
    Keeps     values: only the choice between saving and recomputing is written, as `recompute`.

Results that nothing in the backward pass is computed from are not kept: rows that are only added
up, say, or rows sent on to another rank. Values that one checkpointed function returns and another
is given are kept, as in torch, so that nothing of the first is needed for the second.

Inside a checkpointed function torch recomputes every collective in the backward pass. With
`recompute = "save_exchanges"` rows that forward exchanges received are saved instead; with
"recompute_exchanges" they are recomputed; "model" leaves the model's own policy; "price" saves
them, and chooses later what else is kept (`moe_compile/recompute`). Other collectives,
as those of tensor parallelism, follow the model's policy always: the user chose it for its memory.

Integers that the host has read are kept under every option: reading them once more would be one
copy to the host or more, and they cost 8 bytes each.

Without the promise of `equal_tokens` exchanges are saved under every option. A backward graph
recomputes the values that its gradients need: a rank without tokens needs fewer, and would not
launch a collective that other ranks wait for, or launch it later.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass
from typing import ClassVar, Final

import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.effects import is_size_query
from moe_compile.graph.precedence import integers_taken, is_view
from moe_compile.graph.query import (
    group_name,
    is_all_gather,
    is_all_to_all,
    is_of_backward,
    is_reduce_scatter,
    is_tangent,
    is_wait,
)
from moe_compile.journal.entries import PassReport, Verdict, judged
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass

RECOMPUTED: Final = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
NOT_READ_BACKWARD: Final = "nothing in the backward pass is computed from it"
NOT_CHECKPOINTED: Final = (
    "it is not in a checkpointed function, so the forward pass keeps it anyway"
)


@dataclass(frozen=True)
class SaveExchanges(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "save_exchanges"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    is_needed: ClassVar[bool] = True
    commutes_with: ClassVar[frozenset[str]] = frozenset({"sizes_from_splits"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Write the policy on the launches and waits of checkpointed forward exchanges."""
        _keep_integers(graph)
        groups = state.gathered_groups
        nodes = [n for n in graph.nodes if _is_exchange(n, groups) or _is_received(n, groups)]
        forward = [n for n in nodes if not is_of_backward(n)]
        asked, is_promised = state.config.recompute, state.config.equal_tokens
        if asked == "model" and is_promised:
            skipped = _left(forward, Reason.NOT_ASKED, "recompute is 'model'")
            return PassReport(pass_name=self.name, skipped=skipped)
        between = _between_blocks(graph)
        needed = _needed_backward(graph, frozenset(nodes), between)
        checkpointed = [n for n in forward if "recompute" in n.meta and n in needed]
        useless = [n for n in forward if "recompute" in n.meta and n not in needed]
        repeats = asked == "recompute_exchanges" and is_promised
        policy = CheckpointPolicy.MUST_RECOMPUTE if repeats else CheckpointPolicy.MUST_SAVE
        for node in between:  # recomputation begins at these, no earlier
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for node in checkpointed:  # launch and wait are one buffer: saving both costs one
            node.meta["recompute"] = policy
        others = [n for n in forward if "recompute" not in n.meta]
        left = (
            *_left(useless, Reason.ALREADY_DONE, NOT_READ_BACKWARD),
            *_left(others, Reason.ALREADY_DONE, NOT_CHECKPOINTED),
        )
        return PassReport(
            pass_name=self.name,
            applied=tuple(n.name for n in checkpointed),
            skipped=(*left, *_unmet(state.config, checkpointed)),
        )


def _keep_integers(graph: fx.Graph) -> None:
    """Give the backward pass the integers that the host has read, as numbers."""
    for node in graph.nodes:
        if integers_taken(node) and "recompute" in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _needed_backward(
    graph: fx.Graph, received: Collection[fx.Node], between: Collection[fx.Node]
) -> set[fx.Node]:
    """Return the nodes that the backward pass reads or may recompute, given those `received`.

    It is given those `between` checkpointed functions as well.
    """
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        if (
            is_tangent(node)
            or is_of_backward(node)
            or not backward.isdisjoint(node.all_input_nodes)
        ):
            backward.add(node)
    (output,) = graph.find_nodes(op="output")
    needed: set[fx.Node] = set()
    todo = [n for node in backward - {output} for n in node.all_input_nodes if n not in backward]
    while todo:
        if (node := todo.pop()) in needed:
            continue
        needed.add(node)
        if node in received:  # a wait with its launch: they are one buffer
            needed.update(n for n in node.all_input_nodes if n in received)
        elif node in between:
            continue
        elif not is_size_query(node):  # a number, which is kept by itself
            todo += node.all_input_nodes
    return needed


def _between_blocks(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes that one checkpointed function returns and another is given.

    Torch's partitioner keeps these (`cleanup_recompute_tags`) but for views, which it never does.
    """
    return frozenset(
        node
        for node in graph.nodes
        if _is_recomputed(node)
        and not is_view(node)
        and any(_is_recomputed(n) and _number(n) > _number(node) > 0 for n in node.users)
    )


def _is_recomputed(node: fx.Node) -> bool:
    """Whether the model's policy has the backward pass compute the node again."""
    return node.meta.get("recompute") in RECOMPUTED


def _number(node: fx.Node) -> int:
    """Return the number of the node's checkpointed function, 0 for none; torch counts from 1."""
    return int(node.meta.get("ac_graph_id", 0))


def _unmet(config: MegaMoEConfig, checkpointed: list[fx.Node]) -> tuple[Verdict, ...]:
    """Return a verdict that exchanges are not recomputed although the option asks for it."""
    is_saved = config.recompute in ("save_exchanges", "price")
    if config.equal_tokens or is_saved or not checkpointed:
        return ()
    verdict = Verdict(candidate="checkpointed exchanges", reason=Reason.TOKENS_MAY_DIFFER)
    return (judged(config, "recompute", verdict),)


def _is_exchange(node: fx.Node, gathered_groups: Container[str]) -> bool:
    """Whether the node is an all-to-all, or a gather or sum of a region that has none any more."""
    if is_all_gather(node) or is_reduce_scatter(node):
        return group_name(node) in gathered_groups
    return is_all_to_all(node)


def _is_received(node: fx.Node, gathered_groups: Container[str]) -> bool:
    return is_wait(node) and _is_exchange(node.all_input_nodes[0], gathered_groups)


def _left(nodes: Iterable[fx.Node], reason: Reason, detail: str) -> tuple[Verdict, ...]:
    return tuple(Verdict(candidate=n.name, reason=reason, detail=detail) for n in nodes)
