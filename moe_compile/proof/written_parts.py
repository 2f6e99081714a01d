"""Writes through slices: the contents of a tensor once some rows were written by a view.

Contract
    Slices are followed along the dimension that holds rows, or will hold them, if they start and
    end between runs of rows. Any other tensor that shares memory with a write is forgotten, and
    reading it ends the proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import sympy
import torch
import torch.fx as fx

from moe_compile.proof.operator_call import Call, Knowledge, dim_of
from moe_compile.proof.view_rules import row_dim_through, slice_bounds
from moe_compile.regions.row_domain import (
    Fixed,
    Order,
    Rows,
    Value,
    cut,
    order_after_write_between,
    order_along,
)


class _Part(NamedTuple):
    """`view` is `size` rows of `whole` from `start` on, along `dim`."""

    view: torch.Tensor
    whole: torch.Tensor
    dim: int
    start: sympy.Expr
    size: sympy.Expr


@dataclass(slots=True)
class WrittenParts:
    """The slices of tensors that were taken, and the rows that were written."""

    known: Knowledge
    _parts: dict[int, _Part] = field(default_factory=dict)
    _experts: dict[fx.Node, set[int | None]] = field(default_factory=dict)
    """Node that writes -> experts of the rows; None for rows that are not of one expert."""

    def follow(self, call: Call) -> None:
        """Note the slice that `call` takes; name its size where the tracer gave it a new one."""
        (out,) = call.outputs if len(call.outputs) == 1 else (None,)
        if call.name != "slice" or out is None:
            return
        whole = call.inputs[0]
        dim = dim_of(call.argument("dim", 0), whole.dim())
        total = call.facts.formula(whole.shape[dim])
        order = order_along(call.value(whole), dim, total)
        start, end = slice_bounds(call, total)
        if order is None or cut(order, [start, end - start]) is None:
            return
        self._parts[id(out)] = _Part(out, whole, dim, start, end - start)
        if isinstance(call.value(whole), Fixed) and call.facts.is_unknown(out.shape[dim]):
            call.facts.read_on_host(out.shape[dim], end - start)

    def note_writer(self, call: Call, value: Value | None) -> None:
        """Note the expert of the rows that `call` writes in place: of its source or its result."""
        source = call.argument("source", call.argument("values"))
        rows = call.value(source) if isinstance(source, torch.Tensor) else value
        whose = call.facts.is_rows_of_one(rows.order) if isinstance(rows, Rows) else None
        self._experts.setdefault(call.node, set()).add(whose)

    def for_one(self) -> Iterator[tuple[fx.Node, int]]:
        """Yield the nodes that write rows of one expert, where that has any, and the expert."""
        for node, experts in self._experts.items():
            expert = next(iter(experts))
            if len(experts) == 1 and expert is not None:
                yield node, expert

    def written(
        self, tensors: Iterable[torch.Tensor], call: Call, values: Sequence[Value]
    ) -> Iterator[tuple[torch.Tensor, Value]]:
        """Yield the values of memory that `call` wrote by `tensors`; it returned `values`."""
        returned = {id(t): value for t, value in zip(call.outputs, values, strict=True)}
        given = [*tensors]
        for tensor in given:
            alone = values[0] if len(given) == len(values) == 1 else None
            value = returned.get(id(tensor), alone)
            yield from self._overwrite(tensor, value)
            if value is not None:
                yield tensor, value

    def _overwrite(
        self, tensor: torch.Tensor, value: Value | None
    ) -> list[tuple[torch.Tensor, Value]]:
        """Forget tensors that share memory with `tensor`, which now holds `value`; None: unknown.

        Return the values of the tensors that it is a slice of, and of other views of all of it.
        """
        found: list[tuple[torch.Tensor, Value]] = []
        while value is not None and (part := self._parts.get(id(tensor))) is not None:
            order = self._written(part, value)
            if order is None:
                break
            tensor, value = part.whole, Rows(part.dim, order)
            found.append((tensor, value))
        forgotten = self.known.forget_aliases(tensor)
        if isinstance(value, Rows):
            found += self._views(tensor, value, forgotten)
        return found

    def _views(
        self, written: torch.Tensor, rows: Rows, others: list[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, Value]]:
        """Yield those of `others` that show the rows that were written, with their values."""
        for view in others:
            dim = row_dim_through(self.known.facts, written, rows.dim, view)
            if view is not written and dim is not None:
                yield view, Rows(dim, rows.order)

    def _written(self, part: _Part, value: Value) -> Order | None:
        size = self.known.facts.formula(part.whole.shape[part.dim])
        whole = order_along(self.known.value(part.whole), part.dim, size)
        written = order_along(value, part.dim, part.size)
        if whole is None or written is None:
            return None
        return order_after_write_between(whole, part.start, part.size, written)
