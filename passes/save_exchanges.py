"""Keep the results of exchanges for the backward pass, whatever activation checkpointing says.

Contract
    Requires  FUNCTIONAL.
    Keeps     values: only the choice between saving and recomputing is written, as `recompute`.

Inside a checkpointed function torch recomputes every collective in the backward pass. With
`recompute = "save_exchanges"` what forward exchanges received is saved instead; with
"recompute_exchanges" they are recomputed; "model" leaves the model's own policy. Other collectives,
as those of tensor parallelism, follow the model's policy always: the user chose it for its memory.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from moe_compile.graph.query import (
    group_name,
    is_all_gather,
    is_all_to_all,
    is_reduce_scatter,
    is_wait,
)
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass


@dataclass(frozen=True)
class SaveExchanges(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "save_exchanges"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    commutes_with: ClassVar[frozenset[str]] = frozenset({"sizes_from_splits"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Write the policy on the launches and waits of checkpointed forward exchanges."""
        groups = state.gathered_groups
        nodes = [n for n in graph.nodes if _is_exchange(n, groups) or _is_received(n, groups)]
        forward = [n for n in nodes if n.meta.get("partitioner_tag") != "is_backward"]
        if state.config.recompute == "model":
            return _all_left(self.name, forward, Reason.MODEL_POLICY)
        checkpointed = [n for n in forward if "recompute" in n.meta]
        saves = state.config.recompute == "save_exchanges"
        policy = CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.MUST_RECOMPUTE
        for node in checkpointed:  # launch and wait are one buffer: saving both costs one
            node.meta["recompute"] = policy
        left = _all_left(
            self.name, [n for n in forward if n not in checkpointed], Reason.NOT_CHECKPOINTED
        )
        return PassReport(
            pass_name=self.name,
            applied=tuple(n.name for n in checkpointed),
            skipped=left.skipped,
        )


def _is_exchange(node: fx.Node, gathered_groups: Container[str]) -> bool:
    """Whether the node is an all-to-all, or a gather or sum of a region that has none any more."""
    if is_all_gather(node) or is_reduce_scatter(node):
        return group_name(node) in gathered_groups
    return is_all_to_all(node)


def _is_received(node: fx.Node, gathered_groups: Container[str]) -> bool:
    return is_wait(node) and _is_exchange(node.all_input_nodes[0], gathered_groups)


def _all_left(name: str, nodes: list[fx.Node], reason: Reason) -> PassReport:
    skipped = tuple(Verdict(candidate=n.name, reason=reason) for n in nodes)
    return PassReport(pass_name=name, skipped=skipped)
