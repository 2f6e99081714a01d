"""Send what the model multiplies its rows by, where rows go in two hops: a number for each row.

Contract
    They go flat and at once, and so do their gradients home, where sums are made on the nodes; else
    they get none here: the model's own use gives it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import C10D
from moe_compile.ops.hop_rows import CHUNK_ROWS
from moe_compile.ops.permute import PERMUTE_ROWS
from moe_compile.ops.two_hops import ROWS_RECEIVED
from moe_compile.regions.token_regions import DividedForm
from passes.replay.hops import Cut, Table, split_rows

Way: TypeAlias = tuple[list[Any], list[Any]]
"""Rows that an exchange receives from each rank, and sends to each."""
Factors: TypeAlias = list[dict[fx.Node, fx.Node]]
"""Of each chunk: a factor of the model's rows -> that of the chunk's rows."""


@dataclass(slots=True)
class FactorExchange:
    """The way of a region's factors."""

    form: DividedForm
    cut: Cut
    table: Table
    received: list[fx.Node]
    """Rows of each chunk."""
    way: Way
    """Of the flat exchange of all chunks."""
    _by_chunk: tuple[fx.Node, fx.Node] | None = None

    def send(self, emit: Emitter, factors: Mapping[fx.Node, fx.Node]) -> Factors:
        """Emit, for the rows of each chunk, what the model has for its rows, each by its name."""
        way = (*self.way, self.form.region.group)
        launches = {
            name: emit.call(C10D.all_to_all_single, emit.method("detach", factor), *way)
            for name, factor in factors.items()
        }
        came = {name: emit.call(C10D.wait_tensor, launch) for name, launch in launches.items()}
        if self.form.rounds:
            came = {
                name: emit.call(ROWS_RECEIVED, came[name], factor, *way, False)
                for name, factor in factors.items()
            }
        if len(self.cut.chunks) == 1:
            return [came]
        found: Factors = [{} for _ in self.cut.chunks]
        for name, numbers in came.items():
            moved = emit.call(PERMUTE_ROWS, numbers, *self._order(emit))
            for own, part in zip(found, split_rows(emit, moved, self.received), strict=True):
                own[name] = part
        return found

    def _order(self, emit: Emitter) -> tuple[fx.Node, fx.Node]:
        """Return in which order flat rows lie by chunk, emitted once, and the inverse."""
        if self._by_chunk is None:
            num_rows = emit.call(torch.sym_sum, self.received)
            both = emit.call(CHUNK_ROWS, self.table.whole, list(self.cut.edges), num_rows)
            order, inverse = (emit.call(operator.getitem, both, i) for i in range(2))
            self._by_chunk = order, inverse
        return self._by_chunk
