"""The counts that a rank sends, and the forms that they had before.

Contract
    All forms hold the same numbers in the same flat order, unless one is written in place.
"""

from __future__ import annotations

from typing import Final

import torch.fx as fx

from moe_compile.graph.dependence import Dependence, storages
from moe_compile.graph.query import is_integer

VALUE_KEEPING: Final = frozenset(
    {"to", "int", "long", "view", "reshape", "flatten", "contiguous", "clone", "detach", "alias"}
)
"""Methods that change the form of a tensor of counts, not its values or their flat order."""


def forms_of_counts(exchange: fx.Node) -> list[fx.Node]:
    """Return the counts as sent, and as they were before each change of form only."""
    node = exchange.args[0]
    assert isinstance(node, fx.Node)
    forms = [node]
    while (
        node.op == "call_method"
        and node.target in VALUE_KEEPING
        and isinstance(node.args[0], fx.Node)
        and is_integer(node.args[0])
    ):
        node = node.args[0]
        forms.append(node)
    return forms


def counted_by(forms: list[fx.Node], exchange: fx.Node) -> fx.Node:
    """Return the first node that takes the counts in another form, or sends them."""
    return forms[-2] if len(forms) > 1 else exchange


def fillers_of_counts(exchange: fx.Node, dependence: Dependence) -> set[fx.Node]:
    """Return the nodes that wrote the counts in place before they were read: `scatter_add_`."""
    forms = forms_of_counts(exchange)
    end, memory = dependence.position[counted_by(forms, exchange)], storages(forms[-1])
    return {
        writer
        for writer, written in dependence.writes.items()
        if written & memory and dependence.position[writer] < end
    }
