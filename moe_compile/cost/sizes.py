"""Numbers for sizes the compiler only knows as symbols, so that costs can be estimated.

Contract
    Estimates only. A decision that ranks must agree on may not read them, unless it is part of the
    plan which ranks compare before they run.
    A backed symbol is worth its hint. An unbacked one is worth its balanced share: an all-to-all
    receives as many rows as it sends, which may be noted on it, and rows that are split are split
    evenly. Where routing is uneven, a rank that receives more rows than it sends can be looked at.
    Where tokens are all-gathered, the rows of a rank's experts are noted on the gather.
    Values found in the forward graph are kept in the dictionary given, for the backward graph.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import sympy
import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.graph.launch_order import ANNOTATIONS
from moe_compile.graph.precedence import integers_taken
from moe_compile.graph.query import (
    input_splits,
    is_all_gather,
    is_all_to_all,
    output_splits,
    overload_name,
    tensor_of,
    value_of,
)

ROUNDS: Final = 3
"""Limit of passes over the graph while one solved size may solve another."""
NOMINAL_ROWS: Final = "megamoe_nominal_rows"
"""Key in `node.meta[ANNOTATIONS]`: rows that an all-to-all sends, or that a rank's experts have of
all-gathered tokens, where experts are chosen evenly. Read where nothing else in the graph tells."""
SPLITS: Final = ("aten::split_with_sizes", "aten::split_with_sizes_copy")


def note_nominal_rows(launches: Iterable[fx.Node], rows: int) -> None:
    """Note on launches the rows for experts, as `NOMINAL_ROWS` has them."""
    for launch in launches:
        known = launch.meta.get(ANNOTATIONS) or {}
        launch.meta[ANNOTATIONS] = {**known, NOMINAL_ROWS: rows}


class NominalSizes:
    """Nominal values of symbols, and sizes computed from them."""

    def __init__(self, known: dict[str, int], rows: int = 1, received: float = 1.0) -> None:
        """Share `known`, which is read, and filled by `learn`.

        `rows` is the value of an integer that the host reads and nothing in the graph explains.
        `received` is the number of rows that all-to-alls bring to this rank's experts, over the
        number that it sends.
        """
        self.known = known
        self._rows = rows
        self._received = received
        self._cache: dict[Any, int] = {}

    def learn(self, graph: fx.Graph) -> None:
        """Find a value for every symbol of the graph."""
        for symbol, env in _symbols(graph):
            if (hint := _hint(symbol, env)) is not None:
                self.known.setdefault(str(symbol), max(1, hint))
        gathered = [rows for n in graph.nodes if is_all_gather(n) and (rows := _noted_rows(n))]
        self._rows = max(gathered, default=self._rows)
        exchanges = [n for n in graph.nodes if is_all_to_all(n) or overload_name(n) in SPLITS]
        self._learn_from_all(exchanges)
        self._guess_the_rest(graph, exchanges)
        self._cache.clear()

    def by_symbol(self, graph: fx.Graph) -> Iterator[tuple[Any, Any, int]]:
        """Yield each symbol of the graph that has no hint, its environment, and its value."""
        for symbol, env in _symbols(graph):
            if str(symbol) in self.known and _hint(symbol, env) is None:
                yield symbol, env, self.known[str(symbol)]

    def size(self, size: Any) -> int:
        """Return the nominal value of an integer or symbolic integer."""
        if isinstance(size, int) and not isinstance(size, torch.SymInt):
            return size
        expr = size.node.expr
        if expr not in self._cache:
            values = {s: self.known.get(str(s), 1) for s in expr.free_symbols}
            self._cache[expr] = int(expr.xreplace(_as_sympy(values)))
        return self._cache[expr]

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the nominal shape."""
        return tuple(self.size(s) for s in tensor.shape)

    def nbytes(self, value: Any) -> int:
        """Return the nominal bytes of all tensors in `value`."""
        return sum(
            math.prod(self.shape(leaf)) * leaf.element_size()
            for leaf in pytree.tree_leaves(value)
            if isinstance(leaf, torch.Tensor)
        )

    def _learn_from_all(self, exchanges: Sequence[fx.Node]) -> None:
        for _ in range(ROUNDS):
            for node in exchanges:
                self._learn_from(node)

    def _learn_from(self, node: fx.Node) -> None:
        source = tensor_of(node.all_input_nodes[0])
        if source is None or not source.dim():
            return
        if is_all_to_all(node):
            noted = _noted_rows(node)
            rows = source.shape[0] if noted is None else noted
            self._share(rows, input_splits(node))
            self._share(rows, output_splits(node), self._received)
            return
        dim = node.args[2] if len(node.args) > 2 else 0
        sizes: Any = node.args[1]
        self._share(source.shape[dim], sizes)

    def _share(self, total: Any, parts: Sequence[Any], factor: float = 1.0) -> None:
        """Give the unsolved `parts` even shares of `factor * total` less the solved parts."""
        if self._unsolved(total):
            return
        values = [value_of(p) if isinstance(p, fx.Node) else p for p in parts]
        open_parts = [v for v in values if self._unsolved(v)]
        left = round(factor * self.size(total)) - sum(
            self.size(v) for v in values if not self._unsolved(v)
        )
        for part in open_parts:
            self._solve(part, max(1, left // len(open_parts)))

    def _solve(self, part: torch.SymInt, value: int) -> None:
        """Spread `value` over the unsolved symbols of a sum."""
        symbols = self._unsolved(part)
        solved = {s: self.known.get(str(s), 0) for s in part.node.expr.free_symbols}
        rest = value - int(part.node.expr.xreplace(_as_sympy(solved)))
        for symbol in symbols:
            self.known[str(symbol)] = max(1, rest // len(symbols))

    def _unsolved(self, size: Any) -> list[Any]:
        if not isinstance(size, torch.SymInt):
            return []
        symbols = [s for s in size.node.expr.free_symbols if str(s) not in self.known]
        return sorted(symbols, key=str)

    def _guess_the_rest(self, graph: fx.Graph, exchanges: Sequence[fx.Node]) -> None:
        """Give each unexplained size the rows of the largest input of its maker."""
        for node in graph.nodes:
            for leaf in _sizes(value_of(node)):
                for symbol in self._unsolved(leaf):
                    inputs = [t for a in node.all_input_nodes if (t := tensor_of(a)) is not None]
                    is_sized = not integers_taken(node)  # else its input is a list, not rows
                    rows = [self.size(t.shape[0]) for t in inputs if t.dim() and is_sized]
                    self.known[str(symbol)] = max(rows, default=self._rows)
                    self._learn_from_all(exchanges)


@contextlib.contextmanager
def nominal_hints(graph: fx.Graph, sizes: NominalSizes) -> Iterator[None]:
    """Have torch take our nominal sizes where it would guess: its partitioner, or its Inductor.

    The hints are where `torch._dynamo.override_optimization_hint` puts them; those of before are
    put back. A torch without them guesses.
    """
    hints = [
        (overrides, symbol, value)
        for symbol, env, value in sizes.by_symbol(graph)
        if (overrides := getattr(env, "var_to_hint_override", None)) is not None
    ]
    before = [(overrides, dict(overrides)) for overrides in {id(o): o for o, *_ in hints}.values()]
    for overrides, symbol, value in hints:
        overrides.setdefault(symbol, value)
    try:
        yield
    finally:
        for overrides, old in before:
            overrides.clear()
            overrides.update(old)


def _noted_rows(launch: fx.Node) -> int | None:
    return (launch.meta.get(ANNOTATIONS) or {}).get(NOMINAL_ROWS)


def _as_sympy(values: dict[Any, int]) -> dict[Any, Any]:
    return {symbol: sympy.Integer(value) for symbol, value in values.items()}


def _sizes(value: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.SymInt):
            yield leaf
        elif isinstance(leaf, torch.Tensor):
            yield from (s for s in leaf.shape if isinstance(s, torch.SymInt))


def _symbols(graph: fx.Graph) -> Iterator[tuple[Any, Any]]:
    seen: set[Any] = set()
    for node in graph.nodes:
        for size in _sizes(value_of(node)):
            for symbol in size.node.expr.free_symbols - seen:
                seen.add(symbol)
                yield symbol, size.node.shape_env


def _hint(symbol: Any, env: Any) -> int | None:
    values = getattr(env, "backed_var_to_val", None)
    if values is None:
        values = getattr(env, "var_to_val", {})
    return int(values[symbol]) if symbol in values else None
