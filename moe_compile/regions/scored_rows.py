"""Scores that multiply the rows that a combine brought, and the products that they may precede.

Contract
    A `ScoredRows` names nodes of one graph and is stale once that graph is edited.
    From each of `products` to the combine rows are moved and cast and nothing more: of rows times
    a factor each, all of that makes rows times the same factors. No product adds a bias, and
    nothing else reads its result. Every row that came back is multiplied by one score, which is
    known before the rows are sent.
    It is not looked at whether rows come back in the order sent: the row proof does that.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch.fx as fx
import torch.nn.functional as F

from moe_compile.graph.effects import hands_on, is_pure
from moe_compile.graph.modes import Mode, changes_autocast
from moe_compile.graph.query import argument_of, operator_at
from moe_compile.graph.torch_calls import arguments_of, torch_name
from moe_compile.journal.reasons import Left, Reason
from moe_compile.ops.permute import PERMUTE_ROWS
from moe_compile.regions.grouped_products import is_grouped
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.row_chain import CASTS, holds_fractions, num_rows, type_of
from moe_compile.regions.token_index import TokenIndex
from moe_compile.regions.token_regions import TokenSum
from moe_compile.regions.token_sums import (
    EMPTY,
    WEIGHS,
    ZEROS,
    find_token_sum,
    is_made,
    reads_sizes,
)

MOVES: Final = CASTS | {
    "getitem", "index_select", "split", "split_with_sizes", "chunk", "tensor_split", "unbind",
    "narrow", "cat", "concat", "concatenate", "vstack", "stack", "view", "reshape", "flatten",
    "unflatten", "unsqueeze", "squeeze", "clone", "gather",
}  # fmt: skip
"""Operators that are linear in the rows they are given, whatever their index."""
MEMORY: Final = ZEROS | EMPTY
"""Makers of memory into which rows are put."""
INTO: Final = ("index_copy", "index_add", "scatter")
"""Those that put rows into other rows, or into memory where their names end in `_`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRows:
    """The scores of one region's rows and the products before which they may multiply."""

    region: MoERegion
    scores: fx.Node
    """One score per row in the order sent, `[R, 1]`; with an `order` one for each slot of each
    token, `T * k` in all."""
    order: fx.Node | None
    """`[R]`: the slot of each row sent; None where `scores` has a row for each."""
    weighing: fx.Node
    """The node that multiplies by the scores."""
    late: tuple[fx.Node, ...]
    """Nodes that make scores and order and stand behind the dispatch, in graph order."""
    products: tuple[tuple[fx.Node, fx.Node], ...]
    """The last product of each row, and the rows that it reads, in graph order."""


def find_scored_rows(region: MoERegion) -> ScoredRows:
    """Return the scores after the combine of `region`; raise Left where they must stay."""
    dependence = region.facts.dependence
    chain, sums = find_token_sum(region.result, num_rows(region.rows), dependence)
    weights = [sums.weights] if sums.weights is not None else []
    given = [*chain.factors, *weights]
    if not given:
        raise Left(Reason.ALREADY_DONE, "no score multiplies the rows that come back")
    if len(given) > 1:
        raise Left(
            Reason.NOT_BY_ROW,
            f"{operator_at(sums.total)}: one score must multiply each row, and two factors do",
        )
    (scores,), order = given, None
    if not holds_fractions(scores):
        raise Left(Reason.NOT_BY_ROW, operator_at(scores))
    if weights:
        order = _order_of(sums, region)
        steps: Iterable[fx.Node] = (n for n in sums.tail if torch_name(n) in WEIGHS)
    else:
        steps = chain.nodes
        if num_rows(scores) != num_rows(region.rows):
            raise Left(Reason.NOT_BY_ROW, operator_at(scores))
    weighing = next(node for node in steps if scores in node.all_input_nodes)
    walk = _Walk(region)
    walk.follow(region.combined[-1].sent)
    found = ScoredRows(
        region=region,
        scores=scores,
        order=order,
        weighing=weighing,
        late=_late(region, [scores] if order is None else [scores, order]),
        products=tuple((node, walk.products[node]) for node in dependence.in_order(walk.products)),
    )
    _check_modes(found)
    return found


def _order_of(sums: TokenSum, region: MoERegion) -> fx.Node:
    """Return the slot of each row; raise Left where two rows may have one slot."""
    known = TokenIndex(region.facts.dependence.written)
    order, _ = known.unshifted(sums.index)
    if not sums.is_order or not known.is_permutation(order):
        raise Left(Reason.NO_SLOTS, operator_at(sums.index))
    return sums.index


def _late(region: MoERegion, needed: list[fx.Node]) -> tuple[fx.Node, ...]:
    """Return the nodes behind the dispatch that `needed` take; raise Left if one must stay there.

    They are to run at the dispatch.
    """
    facts, dispatch = region.facts, region.dispatch
    dependence, place = facts.dependence, facts.dependence.position
    above = dependence.above(needed)
    late = [n for n in dependence.in_order(above) if place[n] > place[dispatch]]
    of_rows = dependence.below(one.launch for one in region.dispatched)
    for node in late:
        if node in of_rows:
            raise Left(
                Reason.NOT_BY_ROW,
                f"{operator_at(node)} computes scores from the rows, but they must be known "
                "before the experts run",
            )
        if not is_pure(node):
            is_write = node in dependence.writes
            raise Left(Reason.WRITTEN if is_write else Reason.UNKNOWN_OPERATOR, operator_at(node))
    for node in needed:
        if written := [w for w in dependence.writers(node) if place[w] > place[dispatch]]:
            raise Left(Reason.WRITTEN, f"{operator_at(written[0])} writes to {operator_at(node)}")
    obstacle = facts.legality.written_meanwhile(late, dispatch.next)
    if obstacle is not None:
        raise obstacle.left
    return tuple(late)


def _check_modes(found: ScoredRows) -> None:
    """Raise Left where the scores would multiply, or travel, under another grad mode."""
    modes = found.region.facts.modes
    here = modes[found.weighing]
    for node in (found.region.dispatch, *found.late, *(node for node, _ in found.products)):
        if not _same_gradients(here, modes[node]):
            raise Left(Reason.STATE_CHANGES, operator_at(node))
    for node in found.late:
        if modes[node] != modes[found.region.dispatch]:
            raise Left(Reason.STATE_CHANGES, operator_at(node))


def _same_gradients(here: Mode, there: Mode) -> bool:
    """Whether two modes differ in autocast alone, which has no effect on a multiplication."""
    return here[0] == there[0] and all(map(changes_autocast, {*here[1]} ^ {*there[1]}))


class _Walk:
    """The way from the combine back to the last product of each row."""

    def __init__(self, region: MoERegion) -> None:
        self.combine = region.combine
        self.products: dict[fx.Node, fx.Node] = {}
        """Each product, and the rows that it multiplies."""
        self._on_rows = {*region.row_side}
        self._dependence = region.facts.dependence
        self._seen: dict[fx.Node, None] = {}

    def follow(self, sent: fx.Node) -> None:
        """Find the products; raise Left where one step is more than a move of rows."""
        todo = [sent]
        while todo:
            node = todo.pop()
            if node in self._seen:
                continue
            self._seen[node] = None
            todo += self._dependence.writers(node)
            if (rows := self._multiplied(node)) is not None:
                self.products[node] = rows
            else:
                todo += self._moved(node)
        for node in self._seen:
            others = [u for u in node.users if u not in self._seen and not reads_sizes(u)]
            if left := [u for u in others if u is not self.combine]:
                raise Left(Reason.ESCAPES, operator_at(left[0]))

    def _multiplied(self, node: fx.Node) -> fx.Node | None:
        """Return the rows of a product with a weight and without a bias; None of another node."""
        rows, weight = _operands(node)
        is_product = isinstance(rows, fx.Node) and rows in self._on_rows
        return rows if is_product and weight not in self._on_rows else None

    def _moved(self, node: fx.Node) -> list[fx.Node]:
        """Return the rows that the node moves, and the memory into which it writes them."""
        if is_made(node, MEMORY):
            return []  # the nodes that write it are followed
        moved, dtype = _moved_by(node), type_of(node)
        is_exact = dtype is None or (dtype.is_floating_point and dtype.itemsize > 1)
        are_rows = all(one in self._on_rows or is_made(one, MEMORY) for one in moved)
        if not (moved and is_exact and are_rows and node in self._on_rows):
            raise Left(Reason.NOT_LINEAR, operator_at(node))
        return moved


def _moved_by(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of an operator that is linear in them; [] of another operator."""
    name = torch_name(node)
    if node.target is PERMUTE_ROWS or hands_on(node) or name == "type_as":
        return [node.args[0]]
    if node.target is operator.setitem:
        memory, _, value = node.args
        return [memory, value] if _is_rows(value) else []
    is_into = name.removesuffix("_") in INTO and _puts_rows(node)
    is_sum = name == "add" and all(map(_is_rows, node.args))
    is_move = name in MOVES or is_into or is_sum
    return [source for source in node.all_input_nodes if is_move and holds_fractions(source)]


def _operands(node: fx.Node) -> tuple[Any, Any]:
    """Return what a product without a bias multiplies; (None, None) of another node."""
    for name, second in (("matmul", "other"), ("mm", "mat2"), ("bmm", "mat2")):
        if (given := arguments_of(node, name, "input", second)) is not None:
            return given.get("input"), given.get(second)
    if node.target is F.linear:
        given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
        return _unless(given.get("bias"), given.get("input"), given.get("weight"))
    if is_grouped(node):
        return _unless(argument_of(node, 3, "bias"), *node.args[:2])
    return None, None


def _unless(bias: object, *operands: Any) -> tuple[Any, Any]:
    return operands if bias is None and len(operands) == 2 else (None, None)


def _is_rows(argument: object) -> bool:
    return isinstance(argument, fx.Node) and holds_fractions(argument)


def _puts_rows(node: fx.Node) -> bool:
    """Whether the node puts rows into others as they are: `scatter` can also multiply, or fill."""
    given = dict(zip(("input", "dim", "index", "source"), node.args, strict=False))
    given |= {"source" if name == "src" else name: one for name, one in node.kwargs.items()}
    is_plain = given.keys() == {"input", "dim", "index", "source"} and len(node.args) <= 4
    return is_plain and isinstance(given["source"], fx.Node)
