"""What makes Inductor run the order the FX graph is in.

Contract
    `pinning_patches` names only settings this torch has; torch's version is never read.
    `pin_order` leaves the graph's values and order as they are; where torch lacks the means it
    does nothing and says so.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any, Final

import torch
import torch._inductor.config as inductor_config
import torch.fx as fx
from torch.utils._ordered_set import OrderedSet

from moe_compile.graph.query import is_launch, is_wait, overload_name

KEEPS_ORDER: Final[dict[str, object]] = {
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "reorder_for_locality_in_training": False,
    "reorder_for_compute_comm_overlap": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
}
"""Inductor's own reorderings, all off."""


def pinning_patches() -> dict[str, object]:
    """Return the `config_patches` of `compile_fx` under which Inductor keeps the order given."""
    known = inductor_config.get_config_copy()
    return {key: value for key, value in KEEPS_ORDER.items() if key in known}


def pin_order(graph: fx.Graph) -> bool:
    """Make each launch, wait and matrix product depend on the one before; return whether it did.

    The settings alone do not hold where a kernel of before a wait is fused with one of after it:
    the wait moves up with them. To be the last edit of a graph: the nodes end up inside a
    higher-order operator, where no launch or wait is found any more.
    """
    try:
        control = importlib.import_module("torch._inductor.fx_passes.control_dependencies")
    except ImportError:
        return False
    pinned = [node for node in graph.nodes if _is_pinned(node)]
    after: dict[fx.Node, Any] = {
        later: OrderedSet([earlier])
        for earlier, later in itertools.pairwise(pinned)
        if earlier not in later.all_input_nodes
    }
    control.preserve_node_ordering(graph, after)
    return True


def _is_pinned(node: fx.Node) -> bool:
    if is_launch(node) or is_wait(node):
        return True
    op = overload_name(node).rpartition("::")[2]
    return isinstance(node.target, torch._ops.OpOverload) and op.endswith(("mm", "addmm"))
