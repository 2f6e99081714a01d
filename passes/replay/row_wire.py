"""Emit rows as they are sent, as messages of eight bits where a wire is given, and rows again.

Contract
    A message is packed once and may be moved, cut and handed on as rows are
    (`moe_compile.ops.packed_rows`). It carries no gradient: operators which receive rows do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import tensor_of
from moe_compile.ops.quantized_rows import (
    GATHER_QUANTIZE_PACK,
    UNPACK_DEQUANTIZE,
    UNPACK_DEQUANTIZE_PERMUTE,
)


@dataclass(frozen=True, slots=True)
class RowWire:
    """The rows that travel in eight bits."""

    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, wire: str, rows: fx.Node) -> RowWire | None:
        """Return the wire of an option for rows like `rows`; None where they go as they are."""
        if wire == "same":
            return None
        tensor = tensor_of(rows)
        assert tensor is not None
        return cls(int(tensor.shape[1]), tensor.dtype)


def gradient_wire(wire: str, rows: fx.Node) -> RowWire | None:
    """Return the wire of an option for the gradients of rows like `rows`."""
    return RowWire.of(wire, rows) if wire == "fp8" else None


def as_sent(emit: Emitter, rows: fx.Node, index: fx.Node | None, wire: RowWire | None) -> fx.Node:
    """Emit what is sent of rows `index` of `rows`, or of all."""
    if wire is not None:
        return emit.call(GATHER_QUANTIZE_PACK, rows, *(() if index is None else (index,)))
    return rows if index is None else emit.method("index_select", rows, 0, index)


def as_rows(emit: Emitter, came: fx.Node, index: fx.Node | None, wire: RowWire | None) -> fx.Node:
    """Emit rows `index` of what came, or all of them."""
    if wire is None:
        return came if index is None else emit.method("index_select", came, 0, index)
    if index is None:
        return emit.call(UNPACK_DEQUANTIZE, came, wire.width, wire.dtype)
    return emit.call(UNPACK_DEQUANTIZE_PERMUTE, came, index, wire.width, wire.dtype)
