"""torch's partitioner, and with `recompute = "price"` the partition of it that is chosen.

Contract
    Ranks decide alike: by price only where `equal_tokens` is promised and sizes are static. Where
    they are not, the graph is partitioned as with "save_exchanges", and the journal says why.
    Of a graph that launches nothing, a body compiled by itself say, all is kept.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch._functorch.config as functorch_config
import torch.fx as fx
from functorch.compile import min_cut_rematerialization_partition

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.query import has_static_inputs, is_launch
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState
from moe_compile.recompute.choose_kept import Modules, choose_kept
from moe_compile.recompute.policies import BUDGET

NAME: Final = "recompute"
"""What the journal calls the choice."""
CANDIDATE: Final = "what the forward pass keeps for the backward pass"


def partitioned(
    joint: fx.GraphModule,
    joint_inputs: Any,
    state: CompileState,
    *,
    num_fwd_outputs: int,
    **settings: Any,
) -> Modules:
    """Return the forward and the backward graph; figures of a choice are noted in `state`.

    `settings` are those that AOTAutograd hands to a partitioner.
    """
    partition = functools.partial(
        min_cut_rematerialization_partition,
        joint,
        joint_inputs,
        num_fwd_outputs=num_fwd_outputs,
        **settings,
    )
    if state.config.recompute != "price":
        return partition()
    left = _left(joint.graph, state.config)
    if left is not None:
        state.journal.add("joint", PassReport(pass_name=NAME, skipped=(left,)))
    if left is not None or not any(map(is_launch, joint.graph.nodes)):
        with functorch_config.patch({BUDGET: 1.0}):
            return partition()
    chosen = choose_kept(joint, state, partition, num_fwd_outputs)
    state.kept = chosen.figures
    return chosen.partition.modules


def _left(graph: fx.Graph, config: MegaMoEConfig) -> Verdict | None:
    """Return why nothing is chosen by price; None where it is."""
    if not (config.equal_tokens and has_static_inputs(graph)):
        return Verdict(candidate=CANDIDATE, reason=Reason.NO_PRICE, option=NAME)
    if config.activation_budget == 1:
        detail = "activation_budget is 1.0, so that all is kept"
        return Verdict(candidate=CANDIDATE, reason=Reason.NOT_ASKED, detail=detail, option=NAME)
    return None
