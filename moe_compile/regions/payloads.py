"""Which exchanges of a graph carry the rows of one region: several tensors may go, or come back.

Contract
    Tensors that an all-to-all splits by the same two lists have as many entries along dim 0, one
    per row, and entry i of each goes where row i goes: what is said of the places of rows holds
    for all of them, whatever they hold.

Worked example: tokens and their probabilities are sent, `[R, D]` and `[R]`, both split by
(received, sent); results come back, `[R, D]`, split by (sent, received).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
import torch.fx as fx

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.query import (
    expression_of,
    group_name,
    input_splits,
    is_all_to_all,
    is_integer,
    output_splits,
    tensor_of,
)


@dataclass(frozen=True, slots=True)
class Payloads:
    """The exchanges of one region, each tuple in graph order."""

    dispatches: tuple[fx.Node, ...]
    combines: tuple[fx.Node, ...]

    @property
    def main(self) -> fx.Node:
        """The dispatch of the rows: the one that sends most bytes a row, integers aside."""
        rows = [launch for launch in self.dispatches if not is_integer(launch)]
        return max(rows or self.dispatches, key=_row_bytes)  # of equal ones the first


def find_payloads(
    dispatch: fx.Node,
    combine: fx.Node,
    launches: Iterable[fx.Node],
    used: Collection[fx.Node],
    dependence: Dependence,
) -> Payloads:
    """Return `dispatch`, `combine`, and what travels beside them.

    That is what is split alike and needed for what comes back, and what comes back of what was
    sent; nothing that needs what came back. `used` are of other regions.
    """
    free = [n for n in launches if is_all_to_all(n) and n not in used]
    alike = [n for n in free if n is dispatch or _is_same_exchange(dispatch, n)]
    swapped = [n for n in free if n is combine or is_combine_of(dispatch, n)]
    there, back = {dispatch}, {combine}
    while True:
        below, above = dependence.below(there), dependence.above(back)
        after = dependence.below({user for launch in back for user in launch.users})
        new_there = {n for n in alike if n in above and n not in after} - there - back
        new_back = {n for n in swapped if n in below and n not in after} - there - back
        if not new_there and not new_back:
            break
        there |= new_there
        back |= new_back
    return Payloads(tuple(dependence.in_order(there)), tuple(dependence.in_order(back)))


def is_combine_of(dispatch: fx.Node, other: fx.Node) -> bool:
    """Whether `other` sends what `dispatch` received back to where it came from, by its splits."""
    return (
        other is not dispatch
        and is_all_to_all(other)
        and group_name(other) == group_name(dispatch)
        and _same_sizes(output_splits(other), input_splits(dispatch))
        and _same_sizes(input_splits(other), output_splits(dispatch))
    )


def _is_same_exchange(dispatch: fx.Node, other: fx.Node) -> bool:
    return (
        group_name(other) == group_name(dispatch)
        and _same_sizes(output_splits(other), output_splits(dispatch))
        and _same_sizes(input_splits(other), input_splits(dispatch))
    )


def _same_sizes(left: list[object], right: list[object]) -> bool:
    return len(left) == len(right) and all(
        expression_of(a) == expression_of(b) for a, b in zip(left, right, strict=True)
    )


def _row_bytes(launch: fx.Node) -> int:
    (payload, *_) = launch.all_input_nodes
    tensor = tensor_of(payload)
    widths = () if tensor is None else tensor.shape[1:]
    if tensor is None or any(isinstance(width, torch.SymInt) for width in widths):
        return 0
    return math.prod(widths) * tensor.element_size()
