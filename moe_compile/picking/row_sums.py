"""The sums of all ranks' tokens: zeros to which experts add rows, then the reduce-scatter.

Contract
    Raises Refuse for sums in another form; the graph is not edited.
    Nothing but what is returned, and the reduce-scatter, reads or writes the sums. One addition
    ends before the next begins.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import torch.fx as fx

from moe_compile.attention.head_proof import Refuse
from moe_compile.graph.dependence import Dependence
from moe_compile.graph.query import argument_of, called_name, tensor_of
from moe_compile.graph.same_value import is_same_value
from moe_compile.journal.reasons import Reason
from moe_compile.picking.row_index import in_brackets, index_of, is_row_index
from moe_compile.picking.size_checks import readers_of
from moe_compile.regions.row_chain import CASTS

ZEROS: Final = frozenset({"zeros", "zeros_like", "new_zeros"})
ADDS: Final = frozenset({"index_add", "index_add_"})
PLUS: Final = frozenset({"add", "iadd"})


@dataclass(frozen=True, slots=True)
class Put:
    """One addition of rows to the sums: an `index_add`, or `sums[i] += rows`."""

    nodes: tuple[fx.Node, ...]
    """In graph order: one, or what takes rows of the sums, adds to them and writes them back."""
    before: fx.Node
    """The sums that it is given."""
    indices: tuple[fx.Node, ...]
    """The index, and its like where the same is computed again."""
    rows: fx.Node

    @property
    def is_in_place(self) -> bool:
        """Whether it writes the sums that it is given."""
        return called_name(self.nodes[-1]) != "index_add"


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


def sums_of(
    tail: list[fx.Node], back: fx.Node, dependence: Dependence
) -> tuple[fx.Node, list[Put]]:
    """Return the zeros that the sums begin with, and what adds to them, in graph order."""
    ends = (*tail, back)
    sums = ends[0].all_input_nodes[0]
    zeros = sums
    while called_name(zeros) in ADDS:
        zeros = zeros.args[0]
    if called_name(zeros) not in ZEROS or "out" in zeros.kwargs:
        raise otherwise(f"the sums begin with {zeros.name}, not with zeros")
    puts = _puts(zeros, ends, dependence)
    in_place = {put.is_in_place for put in puts}
    if not puts or len(in_place) > 1 or any(put.nodes[-1] > ends[0] for put in puts):
        raise otherwise("rows are not added to the sums in one way")
    if any(not before.nodes[-1] < after.nodes[0] for before, after in itertools.pairwise(puts)):
        raise otherwise("rows are added to the sums while others are")
    made = [zeros, *(put.nodes[-1] for put in puts)]
    one_by_one = all(put.before is before for before, put in zip(made, puts, strict=False))
    if in_place == {False} and not (one_by_one and sums is made[-1]):
        raise otherwise("not all sums are reduced")
    return zeros, puts


def _puts(zeros: fx.Node, ends: tuple[fx.Node, ...], dependence: Dependence) -> list[Put]:
    """Return every addition to what begins with `zeros`; refuse other readers but `ends`."""
    family, known, puts = {zeros}, {*ends}, list[Put]()
    for node in zeros.graph.nodes:
        if node in known or not family & set(node.all_input_nodes):
            continue
        if not (node.args and node.args[0] in family):
            raise otherwise(f"the sums are read by {node.name}")
        if called_name(node) in ADDS:
            family.add(node)
            puts.append(_index_add(node))
        else:
            puts.append(_indexed(node, dependence))
        known.update(puts[-1].nodes)
    return puts


def _index_add(node: fx.Node) -> Put:
    """Return an `index_add` of whole rows."""
    dim, index, rows = (
        argument_of(node, i, name) for i, name in enumerate(("dim", "index", "source"), 1)
    )
    if dim != 0 or node.kwargs.keys() - {"dim", "index", "source"}:
        raise otherwise(f"{node.name} adds otherwise than row by row")
    if not (isinstance(index, fx.Node) and isinstance(rows, fx.Node) and is_row_index(index)):
        raise otherwise(f"{node.name} adds no rows by an index")
    return Put((node,), node.args[0], (index,), rows)


def _indexed(taken: fx.Node, dependence: Dependence) -> Put:
    """Return `sums[i] += rows`: one node takes rows, one adds to them, one writes them back."""
    index, sums = index_of(taken), taken.args[0]
    added = _only_reader(taken)
    stored = _only_reader(added)
    rows = _added_to(taken, added)
    written = in_brackets(stored.args[1]) if called_name(stored) == "setitem" else None
    if index is None or rows is None or written is None:
        raise otherwise(f"the sums are read by {taken.name}")
    dims = {tensor.dim() for node in (taken, rows, sums) if (tensor := tensor_of(node)) is not None}
    is_same = is_same_value(written.index, index.index, dependence)
    if len(dims) > 1 or not is_same or stored.args[0] is not sums or stored.args[2] is not added:
        raise otherwise(f"{stored.name} writes other rows than {taken.name} takes")
    return Put((taken, added, stored), sums, (index.index, written.index), rows)


def _added_to(taken: fx.Node, added: fx.Node) -> fx.Node | None:
    """Return what `added` adds to the rows `taken`, None where it does something else."""
    if called_name(added) not in PLUS or added.kwargs or len(added.args) != 2:
        return None
    if called_name(added) == "iadd" and added.args[0] is not taken:
        return None
    return next((node for node in added.all_input_nodes if node is not taken), None)


def _only_reader(node: fx.Node) -> fx.Node:
    """Return what alone reads `node`; where others do too, one that is no addition: itself."""
    readers = readers_of(node)
    return readers[0] if len(readers) == 1 else node
