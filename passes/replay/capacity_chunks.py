"""Replay experts with a capacity chunk by chunk: each on the slots of its experts.

Contract
    Requires  a `CapacityRegion`, which proves that experts stay apart.
    The chunks partition the local experts; their results are joined in the dimension of experts.
    Weights with that dimension are cut by one split each; of a loop over experts a chunk runs its
    own alone. Nothing is read by the host.
    Order     at the region's result all dispatch launches, then per chunk: wait, experts, combine.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from moe_compile.capacity.capacity_regions import CapacityRegion
from moe_compile.dims.arguments import joined, moved, one_index, operator_name
from moe_compile.dims.tracker import CUTS, cut_dim
from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import argument_of, tensor_of, value_of
from passes.replay.factor_pieces import Emits, Pieces


def emit_capacity_chunks(region: CapacityRegion, bounds: Sequence[range]) -> fx.Node:
    """Emit the region in chunks of these local experts; return the replacement of its result."""
    emit = Emitter(region.result)
    pieces = pieces_of(region, emit, bounds)
    chunks = [CapacityChunk(emit, region, pieces, experts) for experts in bounds]
    for source in region.cut:
        for chunk, piece in zip(chunks, pieces.cut(source), strict=True):
            chunk.env[source] = piece
    for chunk in chunks:
        chunk.replay(region.dispatch)
    for chunk in chunks:
        for node in region.body[1:]:
            chunk.replay(node)
    result: fx.Node = pieces.join([chunk.env[region.result] for chunk in chunks], region.result)
    result.meta["example_value"] = value_of(region.result)
    return result


def pieces_of(region: CapacityRegion, emit: Emits, bounds: Sequence[range]) -> Pieces:
    """Return the `Pieces` that cut tensors of the region into chunks of these local experts."""
    shares = [len(experts) for experts in bounds]
    return Pieces(emit, region.tracker, region.experts, shares)


class CapacityChunk:
    """Emits the nodes of a region for some of its experts."""

    def __init__(self, emit: Emits, region: CapacityRegion, pieces: Pieces, experts: range) -> None:
        """Emit for local `experts`; first set their pieces of cut tensors in `env`."""
        self._emit, self._region, self._pieces, self._experts = emit, region, pieces, experts
        self.env: dict[fx.Node, Any] = {}

    def replay(self, node: fx.Node) -> None:
        """Emit `node`, unless it works for an expert of another chunk."""
        expert_of = self._region.expert_of
        if node in expert_of:
            if expert_of[node] not in self._experts:
                return
            if not all(i in expert_of for i in node.all_input_nodes if i in self._region.body):
                self._take(node)
                return
        elif any(i in expert_of for i in node.all_input_nodes):
            self._join(node)
            return
        elif operator_name(node) in CUTS and self._is_by_expert(node):
            source, along = self._now(moved(node)), cut_dim(node)
            size = int(value_of(node)[0].shape[along])
            sizes = [size] * len(self._experts)
            self.env[node] = self._emit.call(torch.split, source, sizes, along)
            return
        if self._adds_bias_apart(node):
            self._add_bias_apart(node)
        else:
            self._pieces.replay(node, self.env, len(self._experts))

    def _adds_bias_apart(self, node: fx.Node) -> bool:
        """Whether torch adds the bias after the product: `F.linear` does for rows with gaps.

        Rows of two dimensions are the exception. The only expert of a chunk has rows without gaps,
        for which it would add it inside.
        """
        bias = argument_of(node, 2, "bias") if operator_name(node) == "linear" else None
        if bias is None or len(self._experts) > 1:
            return False
        rows = tensor_of(argument_of(node, 0, "input"))
        return rows is not None and rows.dim() > 2 and not rows.is_contiguous()

    def _add_bias_apart(self, node: fx.Node) -> None:
        names = ("input", "weight", "bias")
        x, weight, bias = (self._now(argument_of(node, i, name)) for i, name in enumerate(names))
        product = self._emit.instead(node, node.target, x, weight)
        self.env[node] = self._emit.instead(node, torch.add, product, bias)

    def _is_by_expert(self, cut: fx.Node) -> bool:
        return all(user in self._region.expert_of for user in cut.users)

    def _now(self, node: fx.Node) -> Any:
        return self.env.get(node, node)

    def _take(self, node: fx.Node) -> None:
        """Emit the selection of one expert's part, by its index among the chunk's experts."""
        index, source = self._region.expert_of[node] - self._experts.start, node.args[0]
        assert isinstance(source, fx.Node)
        if operator_name(source) in CUTS or operator_name(source) == "unbind":
            self.env[node] = self._emit.call(operator.getitem, self._now(source), index)
            return
        found = one_index(node)
        assert found is not None
        self.env[node] = self._emit.method("select", self._now(source), found[0], index)

    def _join(self, node: fx.Node) -> None:
        """Emit the join of all experts' parts, with the chunk's alone."""
        parts = [self.env[part] for part in joined(node) if part in self.env]
        kwargs = {name: given for name, given in node.kwargs.items() if name != "tensors"}
        self.env[node] = self._emit.instead(node, node.target, parts, *node.args[1:], **kwargs)
