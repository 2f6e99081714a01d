"""Inputs of a graph inside another whose gradient has terms from the graph outside before its own.

A body of activation checkpointing is part of the program around it for autograd: one sum runs over
the readers of a tensor inside and outside, from the last to the first.

Contract
    An input is noted if it may have such terms: if the tensor is read behind the call, or is
    given to it twice, or has such terms itself; every input, if arguments cannot be matched.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.fx as fx

from moe_compile.graph.aliases import maker, readers
from moe_compile.graph.gradient_order import OUTER_TERMS, adds_gradient
from moe_compile.graph.inner_graphs import bodies
from moe_compile.graph.query import has_gradient


def note_outer_gradients(graph: fx.Graph) -> None:
    """Note the inputs of the graphs that operators of `graph` run."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        for body in bodies(node):
            given = [i for i in _arguments(node) if i.op != "get_attr"]
            inputs = body.graph.find_nodes(op="placeholder")
            is_known = len(given) == len(inputs)
            for number, inner in enumerate(inputs):
                if not is_known or _has_terms(given[number], node, given, place):
                    inner.meta[OUTER_TERMS] = True


def _arguments(node: fx.Node) -> Iterator[fx.Node]:
    """Return the nodes among the arguments, each as often as it is given."""
    for argument in node.args:
        several = argument if isinstance(argument, list | tuple) else (argument,)
        yield from (one for one in several if isinstance(one, fx.Node))


def _has_terms(
    given: fx.Node, call: fx.Node, all_given: list[fx.Node], place: dict[fx.Node, int]
) -> bool:
    if not has_gradient(given):
        return False
    source = maker(given)
    if source.meta.get(OUTER_TERMS) or sum(maker(one) is source for one in all_given) > 1:
        return True
    return any(place[r] > place[call] and adds_gradient(r) for r in readers(source))
