"""The sums of all ranks' tokens: zeros to which experts add rows, then the reduce-scatter.

Contract
    Raises Refuse for sums in another form; the graph is not edited.
    Nothing but what is returned, and the reduce-scatter, reads or writes the sums.
"""

from __future__ import annotations

from typing import Final

import torch.fx as fx

from moe_compile.attention.head_proof import Refuse
from moe_compile.graph.query import called_name
from moe_compile.journal.reasons import Reason
from moe_compile.regions.row_chain import CASTS

ZEROS: Final = frozenset({"zeros", "zeros_like", "new_zeros"})
ADDS: Final = frozenset({"index_add", "index_add_"})


def otherwise(detail: str) -> Refuse:
    """Return the refusal of another form."""
    return Refuse(Reason.PICKED_OTHERWISE, detail)


def tail_of(back: fx.Node) -> list[fx.Node]:
    """Return what changes the sums before they are reduced, number by number, in graph order."""
    tail, node = list[fx.Node](), back.all_input_nodes[0]
    while node.op == "call_method" and node.target in CASTS and len(node.all_input_nodes) == 1:
        if len(node.users) != 1:
            raise otherwise(f"{node.name} is read by others too")
        tail.append(node)
        node = node.all_input_nodes[0]
    return tail[::-1]


def sums_of(tail: list[fx.Node], back: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return the zeros that the sums begin with, and what adds to them, in graph order."""
    sums = (tail[0] if tail else back).all_input_nodes[0]
    zeros = sums
    while called_name(zeros) in ADDS:
        zeros = zeros.args[0]
    if called_name(zeros) not in ZEROS or "out" in zeros.kwargs:
        raise otherwise(f"the sums begin with {zeros.name}, not with zeros")
    family, puts = {zeros}, list[fx.Node]()
    for node in back.graph.nodes:
        if node in (*tail, back) or not family & set(node.all_input_nodes):
            continue
        if not (called_name(node) in ADDS and node.args and node.args[0] in family):
            raise otherwise(f"the sums are read by {node.name}")
        puts.append(node)
        family.add(node)
    in_place = {called_name(put) == "index_add_" for put in puts}
    if not puts or len(in_place) > 1 or any(put > (tail or [back])[0] for put in puts):
        raise otherwise("rows are not added to the sums in one way")
    one_by_one = all(
        put.args[0] is before for before, put in zip([zeros, *puts], puts, strict=False)
    )
    if in_place == {False} and not (one_by_one and sums is puts[-1]):
        raise otherwise("not all sums are reduced")
    return zeros, puts
