"""One more output of a Dynamo graph: whether rows of any of its regions had no room, and the room
that they needed.

Contract
    The output is last, two int32 on the device; a graph none of whose regions needs it has none.
    Regions inside checkpoints count.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter, append_output


def add_overflow(graph: fx.Graph, overflows: Iterable[fx.Node]) -> bool:
    """Have `graph` return the largest numbers of `overflows` as well; False without any."""
    whole, emit = None, Emitter(graph.output_node())
    for one in overflows:
        whole = one if whole is None else emit.call(torch.maximum, whole, one)
    if whole is not None:
        append_output(graph, whole)
    return whole is not None


def overflows_of(graph: fx.Graph, body: str) -> list[fx.Node]:
    """Return the last output of every call of the graph that is the attribute `body` of this one's.

    The body returns one tensor more than the program reads: it stands behind all others.
    """
    owner = graph.owning_module
    assert owner is not None
    (values,) = owner.get_submodule(body).graph.output_node().args
    found = []
    for attribute in graph.find_nodes(op="get_attr", target=body):
        for call in attribute.users:
            found.append(Emitter(call.next).call(operator.getitem, call, len(values) - 1))
    return found
