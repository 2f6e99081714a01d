"""Replay nodes on some of the indices of one factor: of heads, or of experts.

Contract
    A piece is the part of a tensor at a group's indices. Inputs from outside are cut into pieces
    by one split, so that the gradient is one concatenation; results are joined by one.
    Sizes that the program writes become those of the group. Emits by any emitter, on a graph or on
    values (`FakeRun`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.fx as fx

from moe_compile.dims.arguments import moved, operator_name
from moe_compile.dims.factors import Dims, Factor, flat, group_size, holds, size_of
from moe_compile.dims.tracker import CUTS, Tracker, cut_dim, is_form
from moe_compile.graph.query import is_all_to_all, output_splits, tensor_of
from moe_compile.graph.torch_calls import maker_of


class Emits(Protocol):
    """The interface of an `Emitter`, or of `FakeRun` on values."""

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Emit a call of a function or operator."""

    def method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Emit a call of a tensor method."""

    def copy(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        """Emit `node` again, reading `env[input]` where env has the input."""

    def instead(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Emit a call of a function or operator in the place of `node`."""


class Pieces:
    """Emits pieces of tensors that `tracker` followed, by groups of the indices of `factor`."""

    def __init__(
        self, emit: Emits, tracker: Tracker, factor: Factor, shares: Sequence[int]
    ) -> None:
        """Note the number of indices of each group, in order."""
        self._emit, self._tracker, self._factor = emit, tracker, factor
        self._shares = list(shares)

    def cut(self, source: fx.Node, dims: Dims | None = None) -> list[Any]:
        """Emit every group's piece of `source`, whose factors are `dims`."""
        dims = self._tracker.dims(source) if dims is None else dims
        return self._cut(source, dims)

    def _cut(self, source: Any, dims: Dims) -> list[Any]:
        along = next(i for i, dim in enumerate(dims) if holds(dim, self._factor))
        at = next(i for i, f in enumerate(dims[along]) if holds([f], self._factor))
        outer, factor, inner = dims[along][:at], dims[along][at], dims[along][at + 1 :]
        opened = [*dims[:along], outer, [factor], inner, *dims[along + 1 :]]
        emit, middle = self._emit, along + 1
        whole = emit.method("reshape", source, [size_of(dim) for dim in opened])
        if factor.pieces:
            pieces = self._cut_pieces(whole, opened, middle, factor)
        else:
            parts = emit.call(torch.split, whole, self._shares, middle)
            pieces = [emit.call(operator.getitem, parts, c) for c in range(len(self._shares))]
        return [
            emit.method("reshape", piece, self.sizes(dims, share))
            for piece, share in zip(pieces, self._shares, strict=True)
        ]

    def _cut_pieces(self, whole: Any, dims: Dims, along: int, factor: Factor) -> list[Any]:
        """Emit every group's piece of a concatenation: of each of its parts, joined again."""
        emit = self._emit
        parts = emit.call(torch.split, whole, [size_of(p) for p in factor.pieces], along)
        columns: list[list[Any]] = []
        for i, piece in enumerate(factor.pieces):
            part = emit.call(operator.getitem, parts, i)
            own = [*dims[:along], flat(piece), *dims[along + 1 :]]
            has_factor = holds(piece, self._factor)
            columns.append(self._cut(part, own) if has_factor else [part] * len(self._shares))
        return [emit.call(torch.cat, list(row), along) for row in zip(*columns, strict=True)]

    def replay(self, node: fx.Node, env: dict[fx.Node, Any], share: int) -> None:
        """Emit `node` for a group of `share` indices, its sizes those of the group."""
        emit = self._emit
        if (make := maker_of(node)) is not None:
            env[node] = self.made(node, make, self.sizes_of(node, share))
        elif is_form(node) or operator_name(node) == "expand":
            name = "expand" if operator_name(node) == "expand" else "reshape"
            env[node] = emit.method(name, _source(node, env), self.sizes_of(node, share))
        elif operator_name(node) in CUTS:
            pieces = self._cut_sizes(node, share)
            env[node] = emit.call(torch.split, _source(node, env), pieces, cut_dim(node))
        elif is_all_to_all(node):
            exchanged = emit.method("contiguous", _source(node, env))
            num_ranks = len(output_splits(node))
            splits = [self.sizes_of(node, share)[0] // num_ranks] * num_ranks
            env[node] = emit.instead(node, node.target, exchanged, splits, splits, *node.args[3:])
        else:
            env[node] = emit.copy(node, env)

    def made(self, node: fx.Node, make: Callable[..., Any], sizes: list[int]) -> Any:
        """Emit zeros or ones in other sizes, in the place of `node`."""
        tensor = tensor_of(node)
        assert tensor is not None
        return self._emit.instead(node, make, sizes, dtype=tensor.dtype, device=tensor.device)

    def sizes(self, dims: Dims, share: int) -> list[int]:
        """Return the sizes of dimensions of these factors in a group of `share` indices."""
        return [group_size(dim, self._factor, share) for dim in dims]

    def sizes_of(self, node: fx.Node, share: int) -> list[int]:
        """Return the sizes that `node` has in a group of `share` indices."""
        return self.sizes(self._tracker.dims(node), share)

    def _cut_sizes(self, node: fx.Node, share: int) -> list[int]:
        """Return the sizes of the pieces that a split has for one group, in order."""
        along = cut_dim(node)
        return [self.sizes(dims, share)[along] for dims in self._tracker.pieces_of(node)]

    def join(self, results: Sequence[Any], result: fx.Node) -> Any:
        """Emit the join of the pieces of `result`."""
        dims = self._tracker.dims(result)
        along = next(i for i, dim in enumerate(dims) if holds(dim, self._factor))
        at = dims[along].index(self._factor)
        outer, inner = dims[along][:at], dims[along][at + 1 :]
        opened = [*dims[:along], outer, [self._factor], inner, *dims[along + 1 :]]
        emit = self._emit
        parts = [
            emit.method("reshape", piece, self.sizes(opened, share))
            for piece, share in zip(results, self._shares, strict=True)
        ]
        joined = emit.call(torch.cat, parts, along + 1)
        return emit.method("reshape", joined, [size_of(dim) for dim in dims])


def _source(node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
    """Return a group's piece of the input that `node` moves, or the whole where groups share it."""
    return env.get(moved(node), moved(node))
