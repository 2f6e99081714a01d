"""The scores of a region's rows, in the order that the experts put the rows in.

Contract
    Rows are followed back to the dispatch: an operator that cuts, joins or picks whole rows is
    emitted again on the scores, all others are taken to keep the order of the rows that they read.
    That is a guess: its user has the row proof compare the orders.
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import argument_of, operator_at, tensor_of, waits_on
from moe_compile.graph.torch_calls import torch_name
from moe_compile.journal.reasons import Left, Reason
from moe_compile.ops.permute import PERMUTE_ROWS
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.row_chain import holds_fractions, num_rows, shape_of
from moe_compile.regions.token_sums import is_zeros

ALONG: Final = {
    "split": 2, "split_with_sizes": 2, "chunk": 2, "tensor_split": 2, "unbind": 1, "narrow": 1,
    "index_select": 1, "cat": 1, "concat": 1, "concatenate": 1,
}  # fmt: skip
"""Operators that cut, join or pick along a dimension, and the position of that argument."""
WHOLE: Final = slice(None, None, None)


class ScoresOfRows:
    """Emits scores, `[R, 1]`, for rows of one region."""

    def __init__(self, region: MoERegion, received: fx.Node) -> None:
        """Begin with the scores of the rows as `received`."""
        launch = region.dispatch
        self._found: dict[fx.Node, fx.Node] = dict.fromkeys([launch, *waits_on(launch)], received)
        self._on_rows = {*region.row_side}

    def of(self, rows: fx.Node, emit: Emitter) -> fx.Node:
        """Return the scores of `rows`; emit where they were not asked for before.

        Raises Left where rows are moved in a way that is not known.
        """
        if rows not in self._found:
            self._found[rows] = self._made(rows, emit)
        return self._found[rows]

    def _made(self, rows: fx.Node, emit: Emitter) -> fx.Node:
        name = torch_name(rows)
        if name == "getitem":
            return self._picked(rows, emit)
        if rows.target is PERMUTE_ROWS or name == "vstack" or _is_along_rows(rows, name):
            return self._again(rows, emit)
        return self._same_order(rows, emit)

    def _picked(self, rows: fx.Node, emit: Emitter) -> fx.Node:
        """Return the scores of `source[index]`: an output of a cut, rows, or some columns."""
        source, index = rows.args
        assert isinstance(source, fx.Node)
        if tensor_of(source) is None:
            is_cut = _is_along_rows(source, torch_name(source))
            scores = self.of(source, emit)
            return emit.call(operator.getitem, scores, index) if is_cut else scores
        first: Any = index[0] if isinstance(index, tuple) else index
        scores = self.of(source, emit)
        is_of_columns = first is ... or first == WHOLE
        return scores if is_of_columns else emit.call(operator.getitem, scores, first)

    def _again(self, rows: fx.Node, emit: Emitter) -> fx.Node:
        """Emit an operator that moves whole rows on the scores of what it reads."""
        env: dict[fx.Node, Any] = {}
        for source in rows.all_input_nodes:
            if is_zeros(source):  # padding
                env[source] = emit.call(operator.getitem, source, (..., slice(0, 1)))
            elif source in self._on_rows and holds_fractions(source):
                env[source] = self.of(source, emit)
        return emit.copy(rows, env)

    def _same_order(self, rows: fx.Node, emit: Emitter) -> fx.Node:
        """Return the scores of the first input that has as many rows."""
        length = num_rows(rows)
        for source in rows.all_input_nodes:
            is_alike = length is None or num_rows(source) == length
            if source in self._on_rows and holds_fractions(source) and is_alike:
                return self.of(source, emit)
        raise Left(
            Reason.UNKNOWN_OPERATOR,
            f"{operator_at(rows)} puts rows in an order that megamoe cannot apply to their scores",
        )


def _is_along_rows(node: fx.Node, name: str) -> bool:
    """Whether the node cuts, joins or picks along the dimension of the rows."""
    if name not in ALONG:
        return False
    dim = argument_of(node, ALONG[name], "dim", 0)
    source = node.all_input_nodes[0]
    return dim == 0 or dim == -len(shape_of(source))
