"""The collectives of the user's program, as Dynamo captured it and before any pass.

Contract
    The answer depends on operators, number formats and groups, never on sizes, on split lists or on
    lines of a file: ranks with other numbers of tokens, or with other code around the same
    collectives, give the same.
    Bodies of higher-order operators count where they are called. Sends and receives between two
    ranks are left out: they differ by rank by design.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.query import (
    group_name,
    has_gradient,
    is_launch,
    overload_name,
    source_place,
    tensor_of,
)

POINT_TO_POINT: Final = frozenset({"isend", "irecv", "batch_p2p_ops"})
OUT_FORMS: Final = ("_out", "_")
"""Endings of operators that are the same collective into the caller's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UserOrder:
    """The collectives of one program on one process group, in order."""

    collectives: tuple[str, ...]
    """Each as other ranks see it: operator, number formats, settings such as `sum`."""
    numbers: tuple[int, ...]
    """Numbers of these among the program's collectives on any group."""
    places: tuple[str, ...]
    """The user's line that launches each: for messages only."""
    is_differentiated: bool = False
    """Whether the backward pass is known to launch some too."""

    @property
    def digest_of_numbers(self) -> str:
        """Return a hash that is equal where other groups' collectives stand at the same places."""
        return hashlib.sha256(str(self.numbers).encode()).hexdigest()[:8]

    @property
    def digest(self) -> str:
        """Return a hash that is equal on ranks whose programs launch the same collectives."""
        return hashlib.sha256("\n".join(self.collectives).encode()).hexdigest()[:32]


def user_order(gm: fx.GraphModule) -> dict[str, UserOrder]:
    """Return, per process group, the collectives that `gm` launches; both in graph order."""
    found: dict[str, list[fx.Node]] = {}
    numbers: dict[str, list[int]] = {}
    for number, node in enumerate(_launches(gm), 1):
        found.setdefault(group_name(node), []).append(node)
        numbers.setdefault(group_name(node), []).append(number)
    differentiated = set(_differentiated(gm))
    return {
        group: UserOrder(
            collectives=tuple(_said(node) for node in found[group]),
            numbers=tuple(numbers[group]),
            places=tuple(source_place(node) for node in found[group]),
            is_differentiated=not differentiated.isdisjoint(found[group]),
        )
        for group in found
    }


def _launches(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for node in gm.graph.nodes:
        if is_launch(node) and _operator(node) not in POINT_TO_POINT:
            yield node
        elif node.op == "call_function":
            for argument in node.all_input_nodes:
                body = _body(gm, argument)
                if body is not None:
                    yield from _launches(body)
        elif node.op == "call_module":
            called = gm.get_submodule(str(node.target))
            if isinstance(called, fx.GraphModule):
                yield from _launches(called)


def _differentiated(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the launches through which a gradient flows from a result of `gm` to an input."""
    flows: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.op == "output" or (has_gradient(node) and not flows.isdisjoint(node.users)):
            flows.add(node)
            for body in filter(None, (_body(gm, argument) for argument in node.all_input_nodes)):
                yield from _differentiated(body)
            if node.op == "call_function" and is_launch(node):
                yield node


def _body(gm: fx.GraphModule, argument: fx.Node) -> fx.GraphModule | None:
    """Return the body that an argument of a higher-order operator names; None for all else."""
    if argument.op != "get_attr":
        return None
    value = getattr(gm, str(argument.target), None)
    return value if isinstance(value, fx.GraphModule) else None


def _operator(launch: fx.Node) -> str:
    return overload_name(launch).partition("::")[2]


def _said(launch: fx.Node) -> str:
    operator = _operator(launch)
    for ending in OUT_FORMS:
        operator = operator.removesuffix(ending)
    sent = [tensor_of(node) for node in launch.all_input_nodes]
    formats = [str(t.dtype).removeprefix("torch.") for t in sent if isinstance(t, torch.Tensor)]
    settings = [a for a in (*launch.args, *launch.kwargs.values()) if isinstance(a, str)][:-1]
    return f"{operator}({', '.join([*formats, *settings])})"
