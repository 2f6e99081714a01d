"""Integers that are exchanged, of which the program asserts how many there are: so many.

Contract
    Only the values that the tracer stored change, from a symbol that can be one number only to
    that number; no node does. Of exchanges whose split sizes are known at run time nothing is
    taken: that this rank sends none, say, is its own affair.

`torch.bincount` makes a tensor of unknown length, which `view(ranks, experts)` then asserts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.fx as fx

from moe_compile.graph.query import (
    has_dynamic_splits,
    is_all_to_all,
    is_integer,
    is_launch,
    number_of,
    tensor_of,
    waits_on,
)


def note_known_lengths(graph: fx.Graph) -> None:
    """Store known lengths of what exchanges of integers send and bring."""
    for launch in graph.nodes:
        if not is_launch(launch) or not is_integer(launch):
            continue
        if is_all_to_all(launch) and has_dynamic_splits(launch):
            continue
        for node in (*_sent(launch), launch, *waits_on(launch)):
            _note(node)


def _sent(launch: fx.Node) -> Iterator[fx.Node]:
    """Yield what is sent, and what it was before each change of form."""
    node = launch.args[0]
    while isinstance(node, fx.Node) and is_integer(node):
        yield node
        node = node.args[0] if node.op == "call_method" and node.args else None


def _note(node: fx.Node) -> None:
    tensor = tensor_of(node)
    if tensor is None or all(type(size) is int for size in tensor.shape):
        return
    sizes = [number_of(size) for size in tensor.shape]
    if all(sizes) and tensor.is_contiguous():
        node.meta["example_value"] = tensor.view([size or 0 for size in sizes])
