"""Nodes whose results are kept, because the backward may not compute them again.

Contract
    Only the choice between keeping and computing again is written, as `recompute`. A node that has
    a policy of the user's, or of ours, keeps it.

What is never computed again:
    a collective, and an operator that may communicate: other ranks would have to take part
    a random operator: it would draw other numbers
    an integer that the host reads: the host would wait for the device once more
    an operator with an effect besides its value
    a choice: a sort, and integers computed from floating-point numbers, as of the router's experts.
        Code that computes them again within another kernel may keep more digits of its inputs, and
        would choose otherwise; then rows and counts no longer fit each other.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from moe_compile.graph.effects import is_pure, is_size_query, may_communicate, may_draw
from moe_compile.graph.memory import tensors_in
from moe_compile.graph.precedence import integers_taken
from moe_compile.graph.query import is_launch, is_wait, overload_name, value_of
from moe_compile.regions.row_chain import holds_fractions

SORTS: Final = frozenset({"argsort", "kthvalue", "msort", "sort", "topk"})


def keep_what_is_never_computed_again(graph: fx.Graph) -> None:
    """Have the forward keep the results, or what is computed from them, of such nodes."""
    for node in graph.nodes:
        if node.op == "call_function" and "recompute" not in node.meta and _is_never_again(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _is_never_again(node: fx.Node) -> bool:
    return communicates_itself(node) or may_draw(node) or is_fixed(node)


def communicates_itself(node: fx.Node) -> bool:
    """Whether the node is a launch or a wait, or may communicate as a part of its work."""
    return is_launch(node) or is_wait(node) or may_communicate(node)


def is_fixed(node: fx.Node) -> bool:
    """Whether the node is an integer for the host, a choice, or has another effect than its value.

    Drawing random numbers is such an effect.
    """
    return (
        bool(integers_taken(node)) or _chooses(node) or not (is_size_query(node) or is_pure(node))
    )


def _chooses(node: fx.Node) -> bool:
    if overload_name(node).rpartition("::")[2] in SORTS:
        return True
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False  # attention that drops nothing: its integers are a generator's state, unused
    reads_floats = any(map(holds_fractions, node.all_input_nodes))
    return reads_floats and any(map(_is_integer, tensors_in(value_of(node))))


def _is_integer(tensor: torch.Tensor) -> bool:
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return not is_number and tensor.dtype is not torch.bool
