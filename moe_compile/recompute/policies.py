"""What is chosen, said to torch's partitioner: policies on nodes, and settings to read them by.

Contract
    No policy and no setting of ours is left once the partition is made; those of users stand.
    The partition keeps what was chosen, but for operators that may draw random numbers.

torch's partitioner takes a policy for each node. What is computed again is told PREFER_RECOMPUTE,
all other steps MUST_SAVE; torch's own rules of thumb about what to keep are off. On an operator
that torch's tags say may draw random numbers, attention without dropout among them, such a policy
would have torch hand the generator's state from forward to backward. So it gets none: torch asks
the solver of its budgets which of the costly operators run again, and ours answers by the choice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any, Final

import torch
import torch.fx as fx
from torch._inductor import custom_graph_pass
from torch.utils.checkpoint import CheckpointPolicy

from moe_compile.recompute.storages import Storages

BUDGET: Final = "activation_memory_budget"
SOLVER: Final = "activation_memory_budget_solver"
LEAST: Final = 1e-6
"""A budget for which torch asks its solver; 0 would have it keep nothing, exchanges too."""
NO_RULES: Final = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
    "ban_recompute_not_in_allowlist": False,
    "ban_recompute_reductions": False,
}
"""torch's rules of thumb about what is kept, which hold for nodes without a policy."""

_Solver: type = getattr(custom_graph_pass, "CustomKnapsackSolver", object)
"""Base of solvers; a torch without it refuses any other."""


class _AsChosen(_Solver):
    """Answers torch's partitioner which of the costly nodes are kept, and which run again."""

    def __init__(self, again: Collection[str]) -> None:
        """Take the names of the nodes that run again."""
        self._again = again

    def __call__(self, *given: Any) -> tuple[list[int], list[int]]:
        """Return the places of the nodes kept and of those run again, in the last list `given`."""
        costly: list[fx.Node] = given[-1]
        again = [i for i, node in enumerate(costly) if node.name in self._again]
        return [i for i in range(len(costly)) if i not in again], again

    def uuid(self) -> None:
        """Return None: it is set only while the partitioner runs, where no key is made."""


@contextlib.contextmanager
def chosen_policies(
    joint: fx.GraphModule, storages: Storages, again: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Put the choice on the nodes of `joint` meanwhile; yield the settings that go with it.

    The nodes named in `again` run again, all other steps of `storages` are kept.
    """
    chosen = {step.name for step in storages.steps if step.is_free_to_choose}
    nodes = [node for node in joint.graph.nodes if node.name in chosen]
    asked = [node for node in nodes if node.name in again and _is_seeded(node)]
    for node in nodes:
        if node not in asked:
            is_again = node.name in again
            node.meta["recompute"] = (
                CheckpointPolicy.PREFER_RECOMPUTE if is_again else CheckpointPolicy.MUST_SAVE
            )
    solver = {BUDGET: LEAST, SOLVER: _AsChosen(again)} if asked else {BUDGET: 1.0}
    try:
        yield {**NO_RULES, **solver}
    finally:
        forget_choice(joint.graph, storages)  # the partitioner has put another graph there


def forget_choice(graph: fx.Graph, storages: Storages) -> None:
    """Take the choice from the nodes of a graph, which have the names of those of `storages`."""
    chosen = {step.name for step in storages.steps if step.is_free_to_choose}
    for node in graph.nodes:
        if node.name in chosen:
            node.meta.pop("recompute", None)


def _is_seeded(node: fx.Node) -> bool:
    """Whether torch holds the node to draw random numbers, drawn or not."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
